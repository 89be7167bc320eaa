// Runs csrc/ on the CPU, so that its arithmetic is tested where there is no GPU: every thread of a block is a
// thread, blocks run one after the other. Barriers and atomics are real, so a kernel that forgets one is
// wrong here too. As a program it runs once on a small input, for the sanitizers to look at.

#include <atomic>
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
};

inline thread_local dim3 threadIdx, blockIdx;
inline thread_local EmulatedWarp* emulated_warp;
inline thread_local std::barrier<>* emulated_block;

inline void __syncwarp() { emulated_warp->barrier.arrive_and_wait(); }

inline void __syncthreads() { emulated_block->arrive_and_wait(); }

inline void atomicAdd(int* place, int number) { std::atomic_ref<int>(*place).fetch_add(number); }

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

template <class Call>
cudaError_t cudaLaunchKernel(void (*kernel)(Call), dim3 grid, dim3 block, void** arguments, size_t, void*) {
  std::vector<EmulatedWarp> warps(block.x / 32);
  std::barrier<> block_ends(block.x);
  std::vector<std::jthread> threads;
  for (unsigned thread = 0; thread < block.x; ++thread)
    threads.emplace_back([&, thread] {
      threadIdx = {thread};
      emulated_warp = &warps[thread / 32];
      emulated_block = &block_ends;
      for (blockIdx = {0}; blockIdx.x < grid.x; ++blockIdx.x) {
        kernel(*static_cast<Call*>(arguments[0]));
        block_ends.arrive_and_wait();
      }
    });
  threads.clear();
  return 0;
}

#include "../csrc/count_pairs.cu"

int main() {
  const int rows = 11, tiles = 90, stride = 96, blocks = 1;
  std::vector<float> lse(rows * stride), ones(rows, 1.0f);
  std::vector<int32_t> counts(blocks * BINS);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = -0.01f * static_cast<float>(i * 37 % 2003);
  const std::vector<int64_t> targets(rows, 5);
  const double squares = 11.0;
  CountPairs call{lse.data(), ones.data(), targets.data(), ones.data(), ones.data(), ones.data(),
                        ones.data(), ones.data(), &squares, counts.data(), stride, tiles * TILE,
                        rows, tiles, 1, blocks};
  grpo_fast_count_pairs_2(&call, nullptr);
  int total = 0;
  for (const int count : counts) total += count;
  std::puts(total == rows * (tiles - 1) ? "ran" : "miscounted");
}
