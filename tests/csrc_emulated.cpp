// Runs csrc/ on the CPU, so that its arithmetic is tested where there is no GPU: every thread of a block is a
// thread, blocks run one after the other. Barriers and shuffles are real, so a kernel that forgets one is
// wrong here too. As a program it runs once on a small input, for the sanitizers to look at.

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __shared__ static

using cudaError_t = int;
using cudaStream_t = void*;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct EmulatedWarp {
  std::barrier<> barrier{32};
  float values[32];
};

inline thread_local dim3 threadIdx, blockIdx;
inline thread_local EmulatedWarp* emulated_warp;

inline void __syncwarp() { emulated_warp->barrier.arrive_and_wait(); }

inline float __shfl_sync(unsigned, float value, unsigned lane) {
  emulated_warp->values[threadIdx.x % 32] = value;
  __syncwarp();
  const float result = emulated_warp->values[lane];
  __syncwarp();
  return result;
}

inline float __shfl_down_sync(unsigned mask, float value, unsigned delta) {
  const unsigned lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane + delta < 32 ? lane + delta : lane);
}

inline unsigned __float2uint_ru(float value) {
  return value > 0 ? static_cast<unsigned>(std::ceil(min(value, 4e9f))) : 0;
}

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

template <class Call>
cudaError_t cudaLaunchKernel(void (*kernel)(Call), dim3 grid, dim3 block, void** arguments, size_t, void*) {
  std::vector<EmulatedWarp> warps(block.x / 32);
  std::barrier block_ends(block.x);
  std::vector<std::jthread> threads;
  for (unsigned thread = 0; thread < block.x; ++thread)
    threads.emplace_back([&, thread] {
      threadIdx = {thread};
      emulated_warp = &warps[thread / 32];
      for (blockIdx = {0}; blockIdx.x < grid.x; ++blockIdx.x) {
        kernel(*static_cast<Call*>(arguments[0]));
        block_ends.arrive_and_wait();
      }
    });
  threads.clear();
  return 0;
}

#include "../csrc/mass_curve.cu"

int main() {
  const int rows = 11, tiles = 90, stride = 96;
  std::vector<float> lse(rows * stride), ones(rows, 1.0f), curve(rows * LEVELS);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = -0.01f * static_cast<float>(i * 37 % 2003);
  const std::vector<int64_t> targets(rows, 5);
  const MassCurve call{lse.data(), ones.data(), targets.data(), ones.data(), ones.data(), curve.data(),
                       stride, tiles * TILE, rows, tiles};
  const char* error = grpo_fast_mass_curve_3(call, nullptr);
  std::printf("ran\n");
  return error != nullptr;
}
