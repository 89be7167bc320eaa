// The C interface of libgrpo_fast.so: no torch, no C++ types. Pointers are to device memory unless they say
// otherwise. Every function returns 0 or an error that grpo_fast_message explains, and only enqueues work.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Rises with every change of a function or a struct; a caller built for another number must not call.
enum { GRPO_FAST_INTERFACE = 2 };

enum { GRPO_FAST_BFLOAT16 = 0, GRPO_FAST_FLOAT16 = 1 };

// Errors of this library are negative, those of the CUDA runtime positive.
enum { GRPO_FAST_BAD_DTYPE = -1, GRPO_FAST_BAD_SIZE = -2, GRPO_FAST_BAD_LEVELS = -3 };

int grpo_fast_interface(void);
const char* grpo_fast_message(int error);

// 0 if the device can run the kernels: it has code for it, by the driver's compiler if need be.
int grpo_fast_usable(int device);

typedef struct {
  const void* weight;          // (V, depth) of dtype, unit stride along depth
  const int32_t* columns;      // (capacity,) vocabulary entries, each row's next to each other
  const float* values;         // (capacity,) dL/d(x·w)
  const int64_t* starts;       // (rows,) first entry of the row
  const int32_t* counts;       // (rows,) entries of the row
  const int64_t* targets;      // (rows,)
  const float* row_scale;      // (rows,) |dL/d(x·w)| per probability
  const float* log_threshold;  // (rows,) entries of a smaller log probability are left out, the target's not
  const int64_t* used;         // () entries emitted; nothing is written when they exceed capacity
  const int32_t* overflow;     // () nothing is written when it is set
  void* gradient;              // (rows, depth) contiguous, of dtype, written
  int64_t rows;
  int64_t depth;
  int64_t weight_stride;
  int64_t capacity;
  int32_t dtype;
  int32_t device;  // ordinal of the device that the pointers and the stream belong to
} grpo_fast_hidden_gradient_call;

// gradient[i] = Σ over row i's entries of value · weight[column].
int grpo_fast_hidden_gradient(const grpo_fast_hidden_gradient_call* call, void* stream);

typedef struct {
  const float* tile_lse;   // (tiles, rows) log-sum-exp of each vocabulary tile
  const float* logsumexp;  // (rows,)
  const int64_t* targets;  // (rows,)
  const uint8_t* working;  // (rows,) rows with a gradient
  const float* levels;     // (num_levels,) natural logs, descending, the last -inf
  float* curve;            // (num_levels, rows) written: mass below each level, the target's tile excepted
  int64_t rows;
  int64_t tiles;
  int64_t vocabulary;
  int32_t tile_columns;  // vocabulary entries of a tile
  int32_t num_levels;
  int32_t device;
} grpo_fast_mass_curve_call;

int grpo_fast_mass_curve(const grpo_fast_mass_curve_call* call, void* stream);

#ifdef __cplusplus
}
#endif
