// Pairs of a row and a vocabulary tile, counted by how much of the gradient they can hold.
//
// Triton's histogram votes on every bit of every bin, for each block of a row anew. Here a warp owns a row and a
// histogram in shared memory: a tile is a few instructions and one atomic addition, and a block writes its
// counts once, after all its rows. Integers: the same to the bit in any order.

#include <cmath>
#include <cstdint>

constexpr int TILE = 128;  // vocabulary entries of a tile
constexpr int BINS = 128;  // quarter octaves from the batch's norm down
constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int LOADS = 8;  // in flight per lane

struct CountPairs {  // of numbers of 64 bits alone, as the caller hands over an array of them
  const float* tile_lse;          // (rows, tiles), rows `stride` elements apart: log-sum-exp of each tile
  const float* logsumexp;         // (rows,), as all up to the squares
  const int64_t* targets;
  const float* target_gradient;
  const float* mass_gradient;
  const float* slope;
  const float* entropy;           // or null, with the next
  const float* entropy_gradient;
  const double* squares;          // (parts,) whose sum is the square of the batch's norm
  int32_t* counts;                // (blocks, BINS), written
  int64_t stride;
  int64_t vocabulary;
  int64_t rows;
  int64_t tiles;
  int64_t parts;
  int64_t blocks;
};

namespace {

__global__ void __launch_bounds__(LANES * WARPS) count_pairs(const CountPairs call) {
  __shared__ int histograms[WARPS][BINS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int* histogram = histograms[warp];
  const int rows = call.rows, tiles = call.tiles, stride = call.blocks * WARPS;
  for (int bin = lane; bin < BINS; bin += LANES) histogram[bin] = 0;
  __syncwarp();

  double total = 0.0;
  for (int part = 0; part < call.parts; ++part) total += call.squares[part];
  int exponent = -1022;  // of nothing: far below any number
  const float fraction = total > 0.0 ? static_cast<float>(frexp(total, &exponent)) : 0.5f;
  const float norm = 0.5f * (exponent + log2f(fraction));

  for (int row = blockIdx.x * WARPS + warp; row < rows; row += stride) {
    const float mass = call.mass_gradient[row];
    const float pull = call.entropy_gradient ? call.entropy_gradient[row] : 0.0f;
    if (call.target_gradient[row] == 0.0f && mass == 0.0f && pull == 0.0f) continue;  // false for NaN
    const float* tile_lse = call.tile_lse + row * call.stride;
    const float logsumexp = call.logsumexp[row], slope = call.slope[row];
    const float entropy = call.entropy ? call.entropy[row] : 0.0f;
    const float plain = log2f(fabsf(mass) * slope);
    const int64_t target = call.targets[row];
    const int target_tile = target >= 0 && target < call.vocabulary ? static_cast<int>(target / TILE) : -1;
    for (int first = lane; first < tiles; first += LANES * LOADS) {
      float lse[LOADS];
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const int tile = first + k * LANES;
        lse[k] = tile < tiles && tile != target_tile ? tile_lse[tile] : -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < LOADS; ++k) {
        const float behind = lse[k] - logsumexp;
        float size = plain;
        if (call.entropy_gradient)
          size = log2f(fmaf(fabsf(pull), fabsf(behind + entropy) + 4.85203026f, fabsf(mass)) * slope);
        const float log2_w = fmaf(behind, 1.44269504f, size);
        const float octave = floorf(-4.0f * (log2_w - norm)) + 1.0f;
        const int place = static_cast<int>(fminf(fmaxf(octave, 0.0f), BINS - 1.0f));
        if (lse[k] > -INFINITY && log2_w > -INFINITY) atomicAdd(&histogram[place], 1);  // not NaN
      }
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += LANES * WARPS) {
    int sum = 0;
    for (int each = 0; each < WARPS; ++each) sum += histograms[each][bin];
    call.counts[blockIdx.x * BINS + bin] = sum;
  }
}

}  // namespace

// Null, or why nothing was launched on the current device. The name changes with the arguments.
extern "C" const char* grpo_fast_count_pairs_2(CountPairs* call, cudaStream_t stream) {
  if (call->blocks == 0) return nullptr;
  void* arguments[] = {call};
  const dim3 blocks{static_cast<unsigned>(call->blocks)}, threads{LANES * WARPS};
  const cudaError_t error = cudaLaunchKernel(count_pairs, blocks, threads, arguments, 0, stream);
  return error ? cudaGetErrorString(error) : nullptr;
}
