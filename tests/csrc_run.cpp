// Runs every kernel of csrc/ once, emulated, on small inputs: something for the sanitizers to look at.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "grpo_fast.h"

namespace {

float uniform() { return static_cast<float>(rand()) / static_cast<float>(RAND_MAX); }

int run_hidden_gradient(int64_t depth) {
  const int vocabulary = 40;
  const std::vector<int32_t> counts = {260, 0, 3};
  const auto rows = static_cast<int64_t>(counts.size());
  const std::vector<uint16_t> weight(vocabulary * depth, 0x3F80);
  std::vector<uint16_t> gradient(rows * depth);
  std::vector<int32_t> columns;
  std::vector<int64_t> starts, targets = {1, 2, 3};
  std::vector<float> values, scale(rows, 1.0f), threshold(rows, std::log(0.5f));
  for (const int32_t count : counts) {
    starts.push_back(static_cast<int64_t>(columns.size()));
    for (int32_t i = 0; i < count; ++i) {
      columns.push_back(rand() % vocabulary);
      values.push_back(uniform());
    }
  }
  const auto used = static_cast<int64_t>(columns.size());
  const int32_t overflow = 0;
  const grpo_fast_hidden_gradient_call call = {
      weight.data(), columns.data(), values.data(), starts.data(), counts.data(), targets.data(),
      scale.data(), threshold.data(), &used, &overflow, gradient.data(), rows, depth, depth, used,
      GRPO_FAST_BFLOAT16, -1};
  return grpo_fast_hidden_gradient(&call, nullptr);
}

int run_mass_curve() {
  const int64_t rows = 40, tiles = 90;
  const int levels_count = 48;
  std::vector<float> lse(rows * tiles), logsumexp(rows), levels, curve(levels_count * rows);
  const std::vector<int64_t> targets(rows, 5);
  const std::vector<uint8_t> working(rows, 1);
  for (float& value : lse) value = -20.0f * uniform();
  for (int level = 0; level < levels_count - 1; ++level) levels.push_back(-0.693f * (4 + 0.5f * level));
  levels.push_back(-INFINITY);
  const grpo_fast_mass_curve_call call = {lse.data(), logsumexp.data(), targets.data(), working.data(),
                                          levels.data(), curve.data(), rows, tiles, tiles * 128, 128,
                                          levels_count, -1};
  return grpo_fast_mass_curve(&call, nullptr);
}

}  // namespace

int main() {
  int failed = run_mass_curve();
  for (const int64_t depth : {8, 4104, 37}) failed |= run_hidden_gradient(depth);
  std::printf("ran\n");
  return failed;
}
