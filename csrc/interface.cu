// Version, messages, and whether a device can run what was built.

#include "grpo_fast.h"
#include "launch.h"

namespace {

// Built for the same architectures as every kernel.
__global__ void nothing() {}

}  // namespace

extern "C" int grpo_fast_interface(void) { return GRPO_FAST_INTERFACE; }

extern "C" int grpo_fast_usable(int device) { return can_launch(nothing, device); }

extern "C" const char* grpo_fast_message(int error) {
  switch (error) {
    case 0:
      return "no error";
    case GRPO_FAST_BAD_DTYPE:
      return "the dtype is neither bfloat16 nor float16";
    case GRPO_FAST_BAD_SIZE:
      return "a size is negative, or more rows than 2^31 - 1";
    case GRPO_FAST_BAD_LEVELS:
      return "levels must number 3 to 48";
  }
#ifdef __CUDACC__
  return cudaGetErrorString(static_cast<cudaError_t>(error));
#else
  return "unknown error";
#endif
}
