// dX as a row-gathered sparse product: dX_i = Σ over the row's entries of value · W[column].
//
// One block per row (and 8,192 columns of H) keeps the row in float32 registers and adds whole rows of W to
// it in the order of the entries: no atomics, bit-equal from run to run. The product is bound by how many
// bytes of W are in flight, not by arithmetic. So W travels by asynchronous copies through a ring in shared
// memory, 32 KiB deep per block, which takes no registers: the six blocks that fit a Hopper multiprocessor
// have 192 KiB in flight. A thread reads only what it has copied itself, so the ring needs no barrier.
//
// Entries below the row's threshold are left out while the list is brought into shared memory: the ring
// never waits for a row that does not count.

#include "grpo_fast.h"
#include "half.h"
#include "launch.h"

namespace {

using Call = grpo_fast_hidden_gradient_call;

constexpr int THREADS = 256;
constexpr int WIDTH = 8;       // elements of a 16-byte vector
constexpr int RING_SLOTS = 8;  // vectors per thread

struct Entry {
  int32_t column;
  float value;
};

struct alignas(16) Vector {
  uint16_t bits[WIDTH];
};

// Brings entries [first, first + blockDim) of the list that count into `kept`, in their order.
// Returns how many; barriers on both sides are the caller's.
__device__ __forceinline__ int keep_entries(const Call& call, int64_t row, int32_t first, Entry* kept,
                                            int* warp_kept) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t index = first + static_cast<int32_t>(threadIdx.x);
  Entry entry{};
  bool keep = false;
  if (index < call.counts[row]) {
    entry.column = call.columns[call.starts[row] + index];
    entry.value = call.values[call.starts[row] + index];
    const float scale = call.row_scale[row];
    const float probability = scale == 0.0f ? 0.0f : fabsf(entry.value) / scale;
    // Written so that NaN counts.
    keep = entry.column == call.targets[row] || !(probability < expf(call.log_threshold[row]));
  }
  const unsigned votes = __ballot_sync(0xFFFFFFFFu, keep);
  if (lane == 0) warp_kept[warp] = __popc(votes);
  __syncthreads();
  int before = 0, total = 0;
  for (int other = 0; other < static_cast<int>(blockDim.x / 32); ++other) {
    before += other < warp ? warp_kept[other] : 0;
    total += warp_kept[other];
  }
  if (keep) kept[before + __popc(votes & ((1u << lane) - 1))] = entry;
  return total;
}

// Rows of W on 16 bytes: VECTORS vectors of H per thread, through the ring.
template <class Element, int VECTORS>
struct Aligned {
  static constexpr int STAGES = RING_SLOTS / VECTORS;
  Vector (*ring)[THREADS];  // [RING_SLOTS][THREADS]
  int64_t first;            // element of H
  int64_t step;             // elements from one of the thread's vectors to the next
  float sum[VECTORS][WIDTH] = {};

  __device__ Aligned(Vector (*ring)[THREADS])
      : ring(ring),
        first((int64_t{blockIdx.y} * VECTORS * blockDim.x + threadIdx.x) * WIDTH),
        step(int64_t{blockDim.x} * WIDTH) {}

  __device__ __forceinline__ void fetch(const Call& call, const Entry& entry, int slot) {
    const Element* row = static_cast<const Element*>(call.weight) + entry.column * call.weight_stride;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      if (first + v * step < call.depth)
        start_copy(&ring[slot * VECTORS + v][threadIdx.x], row + first + v * step);
  }

  __device__ __forceinline__ void add(const Call& call, const Entry* kept, int count) {
    for (int e = 0; e < STAGES - 1; ++e) {
      if (e < count) fetch(call, kept[e], e);
      close_copies();
    }
    for (int e = 0, slot = 0; e < count; ++e, slot = (slot + 1) % STAGES) {
      const int ahead = e + STAGES - 1;
      if (ahead < count) fetch(call, kept[ahead], (slot + STAGES - 1) % STAGES);
      close_copies();
      wait_copies<STAGES - 1>();
      const float value = kept[e].value;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        if (first + v * step >= call.depth) continue;
        const Vector w = ring[slot * VECTORS + v][threadIdx.x];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum[v][i] += value * widen(Element{w.bits[i]});
      }
    }
  }

  __device__ __forceinline__ void store(const Call& call, int64_t row) const {
    Element* gradient = static_cast<Element*>(call.gradient) + row * call.depth;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      if (first + v * step >= call.depth) continue;
      uint32_t words[WIDTH / 2];
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) {
        Element low, high;
        narrow(sum[v][2 * i], low);
        narrow(sum[v][2 * i + 1], high);
        words[i] = low.bits | uint32_t{high.bits} << 16;
      }
      store_16_bytes(gradient + first + v * step, words);
    }
  }
};

// Any other H: element by element, COLUMNS of H per thread.
template <class Element>
struct Unaligned {
  static constexpr int COLUMNS = 8;
  int64_t first;
  float sum[COLUMNS] = {};

  __device__ explicit Unaligned(Vector (*)[THREADS])
      : first(int64_t{blockIdx.y} * COLUMNS * blockDim.x + threadIdx.x) {}

  __device__ __forceinline__ void add(const Call& call, const Entry* kept, int count) {
#pragma unroll 2
    for (int e = 0; e < count; ++e) {
      const Element* row = static_cast<const Element*>(call.weight) + kept[e].column * call.weight_stride;
#pragma unroll
      for (int k = 0; k < COLUMNS; ++k) {
        const int64_t column = first + int64_t{k} * blockDim.x;
        if (column < call.depth) sum[k] += kept[e].value * widen(row[column]);
      }
    }
  }

  __device__ __forceinline__ void store(const Call& call, int64_t row) const {
    Element* gradient = static_cast<Element*>(call.gradient) + row * call.depth;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
      const int64_t column = first + int64_t{k} * blockDim.x;
      if (column < call.depth) narrow(sum[k], gradient[column]);
    }
  }
};

template <class Accumulator>
__global__ void __launch_bounds__(THREADS) hidden_gradient(const Call call) {
  __shared__ Vector ring[RING_SLOTS][THREADS];
  __shared__ Entry kept[THREADS];
  __shared__ int warp_kept[THREADS / 32];
  if (*call.overflow != 0 || *call.used > call.capacity) return;
  const int64_t row = blockIdx.x;
  const int32_t entries = call.counts[row];
  Accumulator total(ring);
  for (int32_t first = 0; first < entries; first += static_cast<int32_t>(blockDim.x)) {
    const int count = keep_entries(call, row, first, kept, warp_kept);
    __syncthreads();
    total.add(call, kept, count);
    __syncthreads();
  }
  total.store(call, row);
}

template <class Accumulator>
int launch_over(const Call& call, int64_t elements, int64_t per_thread, void* stream) {
  const int64_t wanted = (elements + per_thread - 1) / per_thread;
  const unsigned threads = wanted >= THREADS ? THREADS : static_cast<unsigned>((wanted + 31) / 32 * 32);
  const auto slices = static_cast<unsigned>((wanted + threads - 1) / threads);
  const dim3 grid{static_cast<unsigned>(call.rows), slices};
  return launch(hidden_gradient<Accumulator>, grid, threads, call.device, stream, call);
}

template <class Element>
int launch_for(const Call& call, void* stream) {
  const auto address = reinterpret_cast<uintptr_t>(call.weight) | reinterpret_cast<uintptr_t>(call.gradient);
  if (address % 16 != 0 || call.depth % WIDTH != 0 || call.weight_stride % WIDTH != 0)
    return launch_over<Unaligned<Element>>(call, call.depth, Unaligned<Element>::COLUMNS, stream);
  const int64_t vectors = call.depth / WIDTH;
  if (vectors <= THREADS) return launch_over<Aligned<Element, 1>>(call, vectors, 1, stream);
  if (vectors <= 2 * THREADS) return launch_over<Aligned<Element, 2>>(call, vectors, 2, stream);
  return launch_over<Aligned<Element, 4>>(call, vectors, 4, stream);
}

}  // namespace

extern "C" int grpo_fast_hidden_gradient(const Call* call, void* stream) {
  if (call->rows < 0 || call->rows > INT32_MAX || call->depth < 0 || call->weight_stride < 0)
    return GRPO_FAST_BAD_SIZE;
  if (call->rows == 0 || call->depth == 0) return 0;
  if (call->dtype == GRPO_FAST_BFLOAT16) return launch_for<Bfloat16>(*call, stream);
  if (call->dtype == GRPO_FAST_FLOAT16) return launch_for<Float16>(*call, stream);
  return GRPO_FAST_BAD_DTYPE;
}
