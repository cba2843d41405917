#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "fovea/replay.h"
#include "tests/support/rng.h"

namespace fovea::test {

/// A replay result made by hand, with plausible figures: `num_steps` steps of all three kinds and
/// one request per four steps.
inline ReplayResult sample_result(int64_t num_steps, uint64_t seed = 1) {
  Rng rng(seed);
  ReplayResult result;
  result.version = "1.2.3";
  result.device = "cpu";
  result.threads = 2;
  result.trace_source = "conversation.jsonl";
  result.options.model = "deepseek-v3.2";
  result.options.token_scale = 64;
  result.options.check_rows = 200;
  result.options.tp = 16;
  result.page = 8;
  result.topk = 64;
  result.num_heads = 8;
  result.cache_pages = 4321;
  result.cache_bytes = 123456789;
  double virtual_ms = 0, real_ms = 0;
  int64_t used = 0, cached = 0;
  for (int64_t i = 0; i < num_steps; ++i) {
    ReplayStep step;
    step.kind = i % 5 == 0 ? StepKind::kPrefill : i % 7 == 0 ? StepKind::kMixed : StepKind::kDecode;
    step.virtual_ms = virtual_ms;
    step.real_ms = real_ms;
    step.step_ms = step.kind == StepKind::kDecode ? 4 + 2 * rng.uniform() : 60 + 80 * rng.uniform();
    step.running = 1 + std::min<int64_t>(63, i / 4 + rng.integer(0, 3));
    step.waiting = std::max<int64_t>(0, num_steps / 6 - i / 3);
    step.prefill_tokens = step.kind == StepKind::kDecode ? 0 : rng.integer(100, 8000) / 64;
    step.decode_tokens = step.kind == StepKind::kPrefill ? 0 : step.running;
    used = std::clamp<int64_t>(used + rng.integer(-30, 45), 10, 3000);
    cached = std::clamp<int64_t>(cached + rng.integer(-10, 20), 0, 1200);
    step.pages_used = used;
    step.pages_cached = cached;
    step.hit_tokens = step.kind == StepKind::kDecode ? 0 : rng.integer(0, 400);
    virtual_ms += step.kind == StepKind::kDecode ? 1600 : 2500;
    real_ms += step.step_ms + 1.5;
    result.hit_tokens += step.hit_tokens;
    result.pages_peak = std::max(result.pages_peak, used);
    result.steps.push_back(step);
  }
  for (int64_t i = 0; i < num_steps / 4; ++i) {
    ReplayRequest request;
    request.id = i;
    request.arrival_ms = static_cast<double>(i / 3) * 3000;
    request.finish_virtual_ms =
        4 * virtual_ms * static_cast<double>(i + 1) / static_cast<double>(num_steps);
    request.prompt_tokens = rng.integer(10, 900);
    request.output_tokens = rng.integer(1, 40);
    result.prompt_tokens += request.prompt_tokens;
    result.requests.push_back(request);
  }
  result.completed = num_steps / 4;
  result.reusable_tokens = result.hit_tokens + 1234;
  result.prefill_rows = 20123;
  result.decode_rows = 4567;
  result.prefill_tokens_per_s = 2345.6;
  result.decode_tokens_per_s = 789.1;
  result.step_p50_ms = 5.25;
  result.step_p90_ms = 101.5;
  result.step_p99_ms = 138.75;
  result.evictions = 17;
  result.preempted = 3;
  result.check = {200, 120, 80, 150, 60, 0, 0.00123, 1.5e-5, 2.5e-6, 1, {}};
  result.modes = {{ForwardMode::kExtend, false, 60, 20123, 9000.5},
                  {ForwardMode::kTargetVerify, false, 240, 98765, 5400.25}};
  result.digest_selection = 0x0123456789abcdefu;
  result.digest_output = 0xfedcba9876543210u;
  result.digest_rows = 24690;
  result.phases = {0.5, 2.25, 30.5, 0.75, 6.125, 40.125};
  result.layers = {{0, "dsa", 15250.5, 200}};
  result.ops = {
      {"index_logits", "dsa", "cpu", 400, 6100.25, 1.5e12, 4.0e10, 0.2, 0.41},
      {"sparse_mla", "dsa", "cpu", 400, 18300.75, 3.0e12, 9.0e10, 0.6, 0.55},
      {"topk_select", "dsa", "cpu", 400, 3050.5, 0, 2.0e10, 0.1, 0.12},
      {"pack_rows", "dsa", "cpu", 400, 900.125, 0, 6.0e9, 0.03, std::nullopt},
      {"metadata_refresh", "", "ref", 400, 300.5, 0, 1.0e8, 0.01, std::nullopt},
  };
  return result;
}

}  // namespace fovea::test
