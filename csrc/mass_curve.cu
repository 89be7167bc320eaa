// For every row, the probability of the vocabulary tiles below each of 48 thresholds, summed exactly.
//
// Triton's histogram counts, so that a bin's mass is only known up to the bin's width; and it votes on every
// bit of every bin. Here a warp owns a row and each lane a histogram of its own, in shared memory with lanes
// innermost: an update is a load, an addition and a store, and the 32 of a warp hit 32 banks. The lanes are
// added up at the end. Every sum has a fixed order: bit-equal from run to run.

#include <cmath>
#include <cstdint>

constexpr int TILE = 128;   // vocabulary entries of a tile
constexpr int LEVELS = 48;  // thresholds 2^-4, 2^-4.5, ..., 2^-27, and zero
constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int LOADS = 8;  // in flight per lane

struct MassCurve {
  const float* tile_lse;         // (rows, tiles), rows `stride` elements apart: log-sum-exp of each tile
  const float* logsumexp;        // (rows,)
  const int64_t* targets;        // (rows,)
  const float* target_gradient;  // (rows,)
  const float* mass_gradient;    // (rows,) where both are zero the row's masses are not read
  float* curve;                  // (rows, LEVELS) written: mass below each level, the target's tile excepted
  int64_t stride;
  int64_t vocabulary;
  int32_t rows;
  int32_t tiles;
};

namespace {

__global__ void __launch_bounds__(LANES * WARPS) mass_curve(const MassCurve call) {
  __shared__ float histograms[WARPS][LEVELS][LANES];  // [n]: mass that lies below exactly n levels
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int row = blockIdx.x * WARPS + warp;
  if (row >= call.rows) return;
  float(&histogram)[LEVELS][LANES] = histograms[warp];
#pragma unroll
  for (int levels = 0; levels < LEVELS; ++levels) histogram[levels][lane] = 0.0f;

  if (call.target_gradient[row] != 0.0f || call.mass_gradient[row] != 0.0f) {  // true for NaN
    const float* tile_lse = call.tile_lse + row * call.stride;
    const float logsumexp = call.logsumexp[row];
    const int64_t target = call.targets[row];
    const int target_tile = target >= 0 && target < call.vocabulary ? static_cast<int>(target / TILE) : -1;
    for (int first = lane; first < call.tiles; first += LANES * LOADS) {
      float lse[LOADS];
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const int tile = first + k * LANES;
        lse[k] = tile < call.tiles && tile != target_tile ? tile_lse[tile] : -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const float log2_mass = (lse[k] - logsumexp) * 1.44269504f;
        // Saturates at zero, which NaN becomes too: it lies below no level.
        const unsigned levels = min(__float2uint_ru(-2.0f * log2_mass - 8.0f), LEVELS - 1u);
        histogram[levels][lane] += exp2f(log2_mass);
      }
    }
  }
  __syncwarp();

  // Lane l adds up levels l and l + 32, then all lanes what lies below that many levels or more.
  float low = 0.0f, high = 0.0f;
#pragma unroll
  for (int other = 0; other < LANES; ++other) {
    low += histogram[lane][lane ^ other];
    if (lane + LANES < LEVELS) high += histogram[lane + LANES][lane ^ other];
  }
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    const float next_low = __shfl_down_sync(~0u, low, step), next_high = __shfl_down_sync(~0u, high, step);
    if (lane + step < LANES) low += next_low, high += next_high;
  }
  low += __shfl_sync(~0u, high, 0);
  float* curve = call.curve + int64_t{row} * LEVELS - 1;
  if (lane > 0) curve[lane] = low;
  if (lane + LANES <= LEVELS) curve[lane + LANES] = high;  // at the last level nothing: no bin is above it
}

}  // namespace

// Null, or why nothing was launched on the current device. The name changes with the arguments.
extern "C" const char* grpo_fast_mass_curve_3(MassCurve call, cudaStream_t stream) {
  if (call.rows == 0) return nullptr;
  void* arguments[] = {&call};
  const dim3 blocks{static_cast<unsigned>((call.rows + WARPS - 1) / WARPS)}, threads{LANES * WARPS};
  const cudaError_t error = cudaLaunchKernel(mass_curve, blocks, threads, arguments, 0, stream);
  return error ? cudaGetErrorString(error) : nullptr;
}
