// bfloat16 and float16 as bits, converted the same way on the device and in the emulation.
#pragma once

#include <stdint.h>
#include <string.h>

#include "launch.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(Bfloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

#ifdef __CUDACC__

__device__ __forceinline__ float widen(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

__device__ __forceinline__ void narrow(float value, Bfloat16& result) {
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ void narrow(float value, Float16& result) {
  result.bits = __half_as_ushort(__float2half_rn(value));
}

#else

inline float widen(Float16 value) {
  _Float16 half;
  memcpy(&half, &value.bits, sizeof half);
  return half;
}

inline void narrow(float value, Bfloat16& result) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool nan = value != value;
  result.bits = nan ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline void narrow(float value, Float16& result) {
  const _Float16 half = value;
  memcpy(&result.bits, &half, sizeof half);
}

#endif
