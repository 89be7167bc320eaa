// For every row, how much probability lies in vocabulary tiles below each of a list of thresholds.
//
// Comparing each tile's mass with every threshold costs as many operations as there are thresholds. Here a
// tile is added to one bin of a histogram that belongs to its thread alone, and the bins are summed once at
// the end: bound by reading the masses once. A warp's lanes are neighbouring rows, so reads are coalesced and
// bins lie in different banks. Every sum has a fixed order.

#include "grpo_fast.h"
#include "launch.h"

namespace {

using Call = grpo_fast_mass_curve_call;

constexpr int LANES = 32;
constexpr int WARPS = 8;
constexpr int MOST_LEVELS = 48;
constexpr int UNROLL = 8;  // loads in flight per thread

// How many of the levels lie above `log_mass`: a guess by their half-octave spacing, corrected by comparison.
__device__ __forceinline__ int levels_above(float log_mass, const float* levels, int last, float inverse_step) {
  const float guess = (levels[0] - log_mass) * inverse_step + 1.0f;
  int above = static_cast<int>(fminf(fmaxf(guess, 0.0f), static_cast<float>(last)));
  while (above > 0 && !(log_mass < levels[above - 1])) --above;
  while (above < last && log_mass < levels[above]) ++above;
  return above;
}

__global__ void __launch_bounds__(LANES * WARPS) mass_curve(const Call call) {
  // Of level 0 upwards: bin b - 1 holds what lies below exactly b levels. Nothing lies below the last.
  __shared__ float histogram[WARPS][MOST_LEVELS - 1][LANES];
  __shared__ float levels[MOST_LEVELS];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  const int last = call.num_levels - 1;
  const int64_t row = int64_t{blockIdx.x} * LANES + lane;
  for (int bin = 0; bin < last; ++bin) histogram[warp][bin][lane] = 0.0f;
  if (static_cast<int>(threadIdx.x) < call.num_levels) levels[threadIdx.x] = call.levels[threadIdx.x];
  __syncthreads();

  if (row < call.rows && call.working[row]) {
    const float logsumexp = call.logsumexp[row];
    const int64_t target = call.targets[row];
    const int64_t target_tile = target >= 0 && target < call.vocabulary ? target / call.tile_columns : -1;
    const float inverse_step = 1.0f / (levels[0] - levels[1]);
    for (int64_t first = warp; first < call.tiles; first += WARPS * UNROLL) {
      float lse[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) {
        const int64_t tile = first + k * WARPS;
        lse[k] = tile < call.tiles ? call.tile_lse[tile * call.rows + row] : -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) {
        const float log_mass = lse[k] - logsumexp;
        const int above = levels_above(log_mass, levels, last, inverse_step);
        if (above > 0 && first + k * WARPS != target_tile) histogram[warp][above - 1][lane] += expf(log_mass);
      }
    }
  }
  __syncthreads();

  if (warp == 0 && row < call.rows) {
    float below = 0.0f;
    call.curve[last * call.rows + row] = below;
    for (int level = last - 1; level >= 0; --level) {
      for (int part = 0; part < WARPS; ++part) below += histogram[part][level][lane];
      call.curve[level * call.rows + row] = below;
    }
  }
}

}  // namespace

extern "C" int grpo_fast_mass_curve(const Call* call, void* stream) {
  if (call->rows < 0 || call->rows > INT32_MAX || call->tiles < 0 || call->tile_columns < 1)
    return GRPO_FAST_BAD_SIZE;
  if (call->num_levels < 3 || call->num_levels > MOST_LEVELS) return GRPO_FAST_BAD_LEVELS;
  if (call->rows == 0) return 0;
  const dim3 grid{static_cast<unsigned>((call->rows + LANES - 1) / LANES)};
  return launch(mass_curve, grid, LANES * WARPS, call->device, stream, *call);
}
