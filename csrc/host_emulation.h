// Runs the kernels of this folder on the CPU, so that their arithmetic is tested where there is no GPU.
//
// Every thread of a block is a thread; blocks run one after the other. Barriers and votes are real, so a
// kernel that forgets one is wrong here too. Nothing is fast.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

struct EmulatedWarp {
  explicit EmulatedWarp(unsigned lanes) : barrier(lanes) {}
  std::barrier<> barrier;
  bool votes[32] = {};
};

inline std::unique_ptr<std::barrier<>> emulated_block;
inline std::vector<std::unique_ptr<EmulatedWarp>> emulated_warps;

inline void __syncthreads() { emulated_block->arrive_and_wait(); }

inline unsigned __ballot_sync(unsigned, bool vote) {
  EmulatedWarp& warp = *emulated_warps[threadIdx.x / 32];
  warp.votes[threadIdx.x % 32] = vote;
  warp.barrier.arrive_and_wait();
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) result |= unsigned{warp.votes[lane]} << lane;
  warp.barrier.arrive_and_wait();
  return result;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline void start_copy(void* shared, const void* global) { std::memcpy(shared, global, 16); }
inline void store_16_bytes(void* global, const uint32_t (&words)[4]) { std::memcpy(global, words, 16); }
inline void close_copies() {}
template <int PENDING>
inline void wait_copies() {}

template <class Kernel>
int can_launch(Kernel, int) {
  return 0;
}

template <class Kernel, class Call>
int launch(Kernel kernel, dim3 grid, unsigned threads, int, void*, Call call) {
  blockDim = {threads};
  gridDim = grid;
  emulated_block = std::make_unique<std::barrier<>>(threads);
  emulated_warps.clear();
  for (unsigned warp = 0; warp < threads / 32; ++warp)
    emulated_warps.push_back(std::make_unique<EmulatedWarp>(32));
  std::vector<std::thread> running;
  for (unsigned thread = 0; thread < threads; ++thread)
    running.emplace_back([=] {
      threadIdx = {thread};
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y};
          kernel(call);
          __syncthreads();
        }
    });
  for (std::thread& thread : running) thread.join();
  return 0;
}
