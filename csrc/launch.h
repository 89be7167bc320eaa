// How a kernel is launched, and the copies that overlap with arithmetic: on a GPU, or in the emulation.
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>
#include <stdint.h>

// Runs `work` with the device as the current one, and makes the caller's current again.
template <class Work>
int on_device(int device, Work work) {
  int before = device;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  error = work();
  if (before != device) cudaSetDevice(before);
  return error;
}

template <class Kernel, class Call>
int launch(Kernel kernel, dim3 grid, unsigned threads, int device, void* stream, Call call) {
  return on_device(device, [&] {
    kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(call);
    return cudaGetLastError();
  });
}

// 0, or why the device cannot run the kernel: no code for its architecture, or a driver that is too old.
template <class Kernel>
int can_launch(Kernel kernel, int device) {
  return on_device(device, [&] {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
  });
}

// Copies 16 bytes from global to shared memory without waiting and without registers.
__device__ __forceinline__ void start_copy(void* shared, const void* global) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void store_16_bytes(void* global, const uint32_t (&words)[4]) {
  // The compiler may split a store of uint4 into four.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Waits for this thread's copies, except those of its newest PENDING groups.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else
#include "host_emulation.h"
#endif
