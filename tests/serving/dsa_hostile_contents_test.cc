// Damaged device contents in every mode: one request of three is spoiled, and the rows of the
// others, the pools and the padding must be those of a step without damage.

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fovea/dsa_backend.h"
#include "tests/serving/dsa_rig.h"
#include "tests/support/memory.h"
#include "tests/support/rng.h"

namespace fovea {
namespace {

using test::DsaRig;
using test::StepOptions;
using test::Tensor;
using Values = std::vector<int32_t>;

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kPageSize = 4, kWidth = 128, kTopk = 8, kHeads = 4, kRowsPerRequest = 3;
constexpr int32_t kCapacity = 4 * kWidth + 9 * kPageSize;  // slots of the rig's pools
constexpr int kBad = 2;                                    // the spoiled request, the last one
constexpr int64_t kBadLength = 30;                         // before the step

// A way to run a step.
struct Surface {
  std::string name;
  ForwardMode mode;
  bool in_plan = false;
  bool is_chain = false;  // the rows of a verify, as one draft step per row of a request
  int64_t padded_rows = 0;
};
void PrintTo(const Surface& surface, std::ostream* out) { *out << surface.name; }

const Surface kSurfaces[] = {
    {"extend", ForwardMode::kExtend, false, false, 8},
    {"mixed", ForwardMode::kMixed, false, false, 8},
    {"decode", ForwardMode::kDecode, false, false, 5},
    {"decode_bucket", ForwardMode::kDecode, true},
    {"idle", ForwardMode::kIdle, false, false, 5},
    {"verify", ForwardMode::kTargetVerify, false, false, 11},
    {"verify_bucket", ForwardMode::kTargetVerify, true},
    {"draft_extend", ForwardMode::kDraftExtend, false, false, 8},
    {"draft_extend_bucket", ForwardMode::kDraftExtend, true, false, 8},
    {"draft_extend_v2", ForwardMode::kDraftExtendV2, false, false, 11},
    {"draft_extend_v2_bucket", ForwardMode::kDraftExtendV2, true},
    {"draft_chain", ForwardMode::kTargetVerify, true, true},
};

bool reads_ext_len(ForwardMode mode) {
  return mode == ForwardMode::kExtend || mode == ForwardMode::kMixed ||
         mode == ForwardMode::kDraftExtend;
}
bool has_fixed_rows(ForwardMode mode) {
  return mode == ForwardMode::kTargetVerify || mode == ForwardMode::kDraftExtendV2;
}

// New tokens of each request.
std::vector<int> counts_of(ForwardMode mode) {
  if (reads_ext_len(mode)) return {2, 1, 2};
  return {1, 1, 1};
}

// The request of each row; -1 in padding.
std::vector<int> row_owners(const Surface& surface) {
  std::vector<int> owners;
  if (surface.is_chain) {
    for (int64_t j = 0; j < kRowsPerRequest; ++j) owners.insert(owners.end(), {0, 1, 2});
    return owners;
  }
  const std::vector<int> counts = counts_of(surface.mode);
  for (int r = 0; r < 3; ++r) {
    const auto rows = has_fixed_rows(surface.mode) ? static_cast<size_t>(kRowsPerRequest)
                                                   : static_cast<size_t>(counts[r]);
    owners.insert(owners.end(), rows, r);
  }
  owners.resize(std::max(owners.size(), static_cast<size_t>(surface.padded_rows)), -1);
  return owners;
}

// What a step reads from the device, for a test to spoil.
struct Contents {
  Values seq_len, pool_row, ext_len, table, positions, out_cache_loc, topk_indices;
  std::vector<size_t> bad_rows;

  int32_t& slot(int64_t position) {
    return table[static_cast<size_t>(int64_t{pool_row[kBad]} * kWidth + position)];
  }
};

struct Fault {
  std::string name;
  MetadataFault reported;
  std::function<void(Contents&)> spoil;
  bool needs_ext_len = false;
  bool selection = false;  // the step is given topk_indices
};

void set_rows(Values& values, const Contents& contents, int32_t value) {
  for (const size_t row : contents.bad_rows) values[row] = value;
}

std::vector<Fault> length_faults() {
  std::vector<Fault> faults;
  for (const int32_t len : {-7, kMin}) {
    faults.push_back({"seq_len " + std::to_string(len), MetadataFault::kNegativeLength,
                      [len](Contents& c) { c.seq_len[kBad] = len; }});
  }
  faults.push_back({"seq_len of no key", MetadataFault::kRowsOverLength,
                    [](Contents& c) { c.seq_len[kBad] = 0; }});
  for (const int32_t len : {int32_t{kWidth} + 1, kMax - 1, kMax}) {
    faults.push_back({"seq_len " + std::to_string(len), MetadataFault::kLengthOverWidth,
                      [len](Contents& c) { c.seq_len[kBad] = len; }});
  }
  for (const int32_t rows : {-1, kMin}) {
    faults.push_back({"ext_len " + std::to_string(rows), MetadataFault::kNegativeRows,
                      [rows](Contents& c) { c.ext_len[kBad] = rows; }, true});
  }
  // Past num_rows = 5 by one (into the padding), past the padding, past the bounds of everything.
  for (const int32_t rows : {3, 20, int32_t{kBadLength}}) {
    faults.push_back({"ext_len " + std::to_string(rows), MetadataFault::kRowCount,
                      [rows](Contents& c) { c.ext_len[kBad] = rows; }, true});
  }
  faults.push_back({"ext_len max", MetadataFault::kRowsOverLength,
                    [](Contents& c) { c.ext_len[kBad] = kMax; }, true});
  return faults;
}

std::vector<Fault> table_faults() {
  std::vector<Fault> faults;
  for (const int32_t row : {kMin, -1, 9, kMax}) {
    faults.push_back({"pool_row " + std::to_string(row), MetadataFault::kPoolRow,
                      [row](Contents& c) { c.pool_row[kBad] = row; }});
  }
  for (const int32_t slot : {kMin, -1, kCapacity, kMax}) {
    faults.push_back({"slot " + std::to_string(slot), MetadataFault::kSlotRange,
                      [slot](Contents& c) { c.slot(kPageSize) = slot; }});
    faults.push_back(
        {"every slot " + std::to_string(slot), MetadataFault::kSlotRange, [slot](Contents& c) {
           for (int64_t p = 0; p < kWidth; ++p) c.slot(p) = slot;
         }});
  }
  faults.push_back({"slot inside a page", MetadataFault::kSlotLayout,
                    [](Contents& c) { c.slot(kPageSize) += 1; }});
  return faults;
}

std::vector<Fault> row_faults() {
  std::vector<Fault> faults;
  for (const int32_t position : {kMin, -1, int32_t{kWidth}, kMax}) {
    faults.push_back({"position " + std::to_string(position), MetadataFault::kNone,
                      [position](Contents& c) { set_rows(c.positions, c, position); }});
  }
  for (const int32_t slot : {kMin, -2, kCapacity, kMax}) {
    faults.push_back({"out_cache_loc " + std::to_string(slot), MetadataFault::kStoreSlot,
                      [slot](Contents& c) { set_rows(c.out_cache_loc, c, slot); }});
  }
  for (const int32_t index : {kMin, -2, kCapacity, kMax}) {
    faults.push_back({"index " + std::to_string(index), MetadataFault::kIndexRange,
                      [index](Contents& c) {
                        for (const size_t row : c.bad_rows) {
                          for (size_t i = 0; i < kTopk; i += 2) {
                            c.topk_indices[row * kTopk + i] = index;
                          }
                        }
                      },
                      false, true});
  }
  return faults;
}

DsaConfig config_of(RowFormat format, bool fuse_transform) {
  DsaConfig config = DsaRig::small_config(kPageSize, format);
  config.rows_per_request = kRowsPerRequest;
  config.fuse_transform = fuse_transform;
  config.check = true;
  config.cache_slots = kCapacity;
  return config;
}

// Tensors whose last byte is followed by a page that cannot be read.
class Guards {
 public:
  // Rows first, first + step, ... of `from`.
  template <class View>
  View take(const View& from, int64_t first, int64_t step, int64_t count) {
    if (!from.defined()) return from;
    const int64_t row_bytes = from.stride[0] * static_cast<int64_t>(size_of(from.dtype));
    auto* const to = static_cast<uint8_t*>(room(count * row_bytes));
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * row_bytes,
                  static_cast<const uint8_t*>(from.data) + (first + i * step) * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
    View view = from;
    view.shape[0] = count;
    view.data = to;
    return view;
  }
  template <class View>
  void move(View& view) {
    if (view.defined()) view = take(view, 0, 1, view.shape[0]);
  }
  ConstTensorView put(const Values& values, std::initializer_list<int64_t> shape) {
    ConstTensorView view = make_tensor(static_cast<const void*>(values.data()), DType::kI32, shape);
    move(view);
    return view;
  }

 private:
  void* room(int64_t bytes) {
    memory_.push_back(std::make_unique<test::GuardedMemory>(static_cast<size_t>(bytes)));
    return memory_.back()->data();
  }
  std::vector<std::unique_ptr<test::GuardedMemory>> memory_;
};

template <class T>
void append(std::vector<T>& to, const ConstTensorView& view) {
  const auto* const begin = static_cast<const T*>(view.data);
  to.insert(to.end(), begin, begin + view.num_elements());
}

template <class T>
std::vector<T> to_vector(const ConstTensorView& view) {
  std::vector<T> values;
  append(values, view);
  return values;
}

// What came out of a step, or of the steps of a chain one after the other.
struct Outcome {
  std::vector<bf16_t> out;
  std::vector<float> lse;
  Values indices;
  std::vector<uint8_t> kv_pool, index_pool;
  std::vector<int32_t> bad_pages;
  std::vector<MetadataReport> reports;

  void add_rows(const DsaForwardTensors& tensors) {
    append(out, tensors.out);
    append(lse, tensors.lse);
    if (tensors.indices.defined()) append(indices, tensors.indices);
  }
  bool has_same_row(const Outcome& other, size_t row) const {
    const auto same = [row](const auto& a, const auto& b, size_t width) {
      return std::memcmp(&a[row * width], &b[row * width], width * sizeof(a[0])) == 0;
    };
    return same(out, other.out, kHeads * 512) && same(lse, other.lse, kHeads) &&
           (indices.empty() || same(indices, other.indices, kTopk));
  }
  bool is_empty_row(size_t row) const {
    for (size_t i = 0; i < kHeads * 512; ++i) {
      if (out[row * kHeads * 512 + i].bits != 0) return false;
    }
    for (size_t h = 0; h < kHeads; ++h) {
      if (lse[row * kHeads + h] != -kInf) return false;
    }
    for (size_t i = 0; !indices.empty() && i < kTopk; ++i) {
      if (indices[row * kTopk + i] != -1) return false;
    }
    return true;
  }
};

// A selection of the latest keys of each row; garbage after them and in padding.
Values latest_keys(const ConstTensorView& positions, const Contents& contents,
                   const std::vector<int>& owners, bool as_slots) {
  Values selection(owners.size() * kTopk, 4);
  for (size_t row = 0; row < owners.size(); ++row) {
    if (owners[row] < 0) continue;
    const int32_t position = static_cast<const int32_t*>(positions.data)[row];
    const int64_t table_row = contents.pool_row[static_cast<size_t>(owners[row])];
    for (int32_t i = 0; i < kTopk && i <= position; ++i) {
      const auto at = static_cast<size_t>(table_row * kWidth + position - i);
      selection[row * kTopk + static_cast<size_t>(i)] =
          as_slots ? contents.table[at] : position - i;
    }
  }
  return selection;
}

class HostileStep {
 public:
  HostileStep(const Surface& surface, const DsaConfig& config, int threads)
      : surface_(surface), rig_(config, threads) {
    rig_.step(ForwardMode::kExtend, {{0, 20}, {1, 9}, {kBad, kBadLength}});
    if (surface.is_chain) {
      for (int64_t j = 0; j < kRowsPerRequest; ++j) add_plan({ForwardMode::kDecode, 3, 1});
    } else if (surface.in_plan) {
      const bool one_row = surface.mode == ForwardMode::kDecode;
      add_plan({surface.mode, 3, one_row ? 1 : kRowsPerRequest});
    }
  }

  // Runs the step with spoiled contents.
  Outcome run(const std::function<void(Contents&)>& spoil, bool give_selection) {
    Outcome outcome;
    Guards guards;
    StepOptions options;
    options.padded_rows = surface_.padded_rows;
    options.host_lengths = false;
    if (surface_.in_plan && !surface_.is_chain) options.plan = &plans_.front();
    DsaForwardTensors given;
    options.adjust = [&](ForwardBatch& batch, DsaForwardTensors& tensors) {
      ForwardBatch spoiled = batch;
      given = tensors;
      prepare(spoiled, given, spoil, give_selection, guards, outcome);
      if (surface_.is_chain) {
        run_chain(spoiled, given, guards, outcome);
      } else {
        batch = spoiled;
        tensors = given;
      }
    };
    const std::vector<int> counts = counts_of(surface_.mode);
    rig_.step(surface_.mode, {{0, counts[0]}, {1, counts[1]}, {kBad, counts[2]}}, options);
    if (!surface_.is_chain) {
      outcome.add_rows(given);
      outcome.reports.push_back(surface_.in_plan ? plans_.front().report()
                                                 : rig_.backend().report());
    }
    outcome.kv_pool = to_vector<uint8_t>(given.kv_pool);
    outcome.index_pool = to_vector<uint8_t>(given.index_pool);
    return outcome;
  }

 private:
  void add_plan(const StepBucket& bucket) {
    plans_.push_back(rig_.backend().make_step_plan(bucket));
  }

  void prepare(ForwardBatch& batch, DsaForwardTensors& tensors,
               const std::function<void(Contents&)>& spoil, bool give_selection, Guards& guards,
               Outcome& outcome) {
    ASSERT_EQ(tensors.kv_pool.shape[0] * kPageSize, kCapacity);
    std::vector<int> owners = row_owners(surface_);
    if (surface_.is_chain) owners = {0, 0, 0, 1, 1, 1, 2, 2, 2};
    Contents contents;
    contents.seq_len = to_vector<int32_t>(batch.seq_len);
    contents.pool_row = to_vector<int32_t>(batch.pool_row);
    if (batch.ext_len.defined()) contents.ext_len = to_vector<int32_t>(batch.ext_len);
    contents.table = to_vector<int32_t>(batch.req_to_token);
    contents.positions = to_vector<int32_t>(batch.positions);
    contents.out_cache_loc = to_vector<int32_t>(batch.out_cache_loc);
    for (size_t row = 0; row < owners.size(); ++row) {
      if (owners[row] == kBad) contents.bad_rows.push_back(row);
    }
    for (int64_t p = 0; p < kBadLength + kRowsPerRequest; ++p) {
      outcome.bad_pages.push_back(contents.slot(p) / kPageSize);
    }
    contents.topk_indices =
        latest_keys(batch.positions, contents, owners, rig_.config().fuse_transform);
    spoil(contents);
    const auto rows = static_cast<int64_t>(owners.size());
    batch.seq_len = guards.put(contents.seq_len, {3});
    batch.pool_row = guards.put(contents.pool_row, {3});
    if (batch.ext_len.defined()) batch.ext_len = guards.put(contents.ext_len, {3});
    batch.req_to_token = guards.put(contents.table, {batch.req_to_token.shape[0], kWidth});
    batch.positions = guards.put(contents.positions, {rows});
    batch.out_cache_loc = guards.put(contents.out_cache_loc, {rows});
    if (give_selection) {
      tensors.topk_indices = guards.put(contents.topk_indices, {rows, kTopk});
      tensors.indices = {};
    } else {
      tensors.indices = rig_.indices;
    }
    for (ConstTensorView* const view :
         {&tensors.q, &tensors.k, &tensors.index_q, &tensors.index_k, &tensors.head_gate,
          &tensors.norm_weight, &tensors.norm_bias, &tensors.cos_sin}) {
      guards.move(*view);
    }
    for (TensorView* const view :
         {&tensors.kv_pool, &tensors.index_pool, &tensors.out, &tensors.lse, &tensors.indices}) {
      guards.move(*view);
    }
  }

  // Row j of each request of a verify becomes draft step j.
  void run_chain(const ForwardBatch& verify, const DsaForwardTensors& rows, Guards& guards,
                 Outcome& outcome) {
    const auto take = [&](auto& view, int64_t j) {
      view = guards.take(view, j, kRowsPerRequest, 3);
    };
    ForwardBatch batch = verify;
    batch.mode = ForwardMode::kDecode;
    batch.num_rows = 3;
    batch.positions = batch.out_cache_loc = {};
    std::vector<DraftStep> steps;
    for (int64_t j = 0; j < kRowsPerRequest; ++j) {
      steps.push_back({&plans_[static_cast<size_t>(j)], verify.positions, verify.out_cache_loc});
      take(steps.back().positions, j);
      take(steps.back().out_cache_loc, j);
    }
    rig_.backend().begin_draft_steps(batch, steps);
    for (int64_t j = 0; j < kRowsPerRequest; ++j) {
      DsaForwardTensors tensors = rows;
      for (ConstTensorView* const view :
           {&tensors.q, &tensors.k, &tensors.index_q, &tensors.index_k, &tensors.head_gate,
            &tensors.topk_indices}) {
        take(*view, j);
      }
      for (TensorView* const view : {&tensors.out, &tensors.lse, &tensors.indices}) take(*view, j);
      const DsaStepPlan& plan = plans_[static_cast<size_t>(j)];
      rig_.backend().forward(plan, rig_.layer, tensors);
      outcome.add_rows(tensors);
      outcome.reports.push_back(plan.report());
    }
  }

  Surface surface_;
  DsaRig rig_;
  std::vector<DsaStepPlan> plans_;
};

// Bytes of the pool outside the pages of the spoiled request.
std::vector<uint8_t> healthy_pages(std::vector<uint8_t> pool, const Outcome& outcome) {
  const size_t page_bytes = pool.size() / (kCapacity / kPageSize);
  for (const int32_t page : outcome.bad_pages) {
    std::fill_n(pool.begin() + static_cast<int64_t>(static_cast<size_t>(page) * page_bytes),
                page_bytes, uint8_t{0});
  }
  return pool;
}

class DsaHostileContents : public testing::TestWithParam<Surface> {
 protected:
  static Outcome run(const DsaConfig& config, int threads, const Fault& fault) {
    return HostileStep(GetParam(), config, threads).run(fault.spoil, fault.selection);
  }

  // Everything but the rows and pages of the spoiled request.
  static void expect_contained(const Outcome& spoiled, const Outcome& sound) {
    const std::vector<int> owners = row_owners(GetParam());
    ASSERT_EQ(spoiled.lse.size(), owners.size() * kHeads);
    for (size_t row = 0; row < owners.size(); ++row) {
      if (owners[row] == kBad) continue;
      if (owners[row] < 0) {
        EXPECT_TRUE(spoiled.is_empty_row(row)) << "padding row " << row;
      } else {
        EXPECT_TRUE(spoiled.has_same_row(sound, row)) << "row " << row;
        EXPECT_FALSE(sound.is_empty_row(row)) << "row " << row;
      }
    }
    EXPECT_EQ(healthy_pages(spoiled.kv_pool, sound), healthy_pages(sound.kv_pool, sound));
    EXPECT_EQ(healthy_pages(spoiled.index_pool, sound), healthy_pages(sound.index_pool, sound));
    for (const int32_t index : spoiled.indices) EXPECT_GE(index, -1);
  }

  // Each fault in one of four forms of the step: cache format, form and source of the selection.
  void run_faults(const std::vector<Fault>& faults) {
    const auto config_of_form = [](int form) {
      return form < 2 ? config_of(RowFormat::kV32, true) : config_of(RowFormat::kF576, false);
    };
    std::vector<Outcome> sound;
    for (int form = 0; form < 4; ++form) {
      const Fault none{"none", MetadataFault::kNone, [](Contents&) {}, false, form % 2 == 1};
      sound.push_back(run(config_of_form(form), 1, none));
      for (const MetadataReport& report : sound.back().reports) {
        EXPECT_EQ(report.fault, MetadataFault::kNone) << to_string(report);
      }
      expect_contained(sound.back(), sound.back());
    }
    int form = 0;
    for (const Fault& fault : faults) {
      if (fault.needs_ext_len && !reads_ext_len(GetParam().mode)) continue;
      // A verify and a chain add their rows to the length.
      if (fault.reported == MetadataFault::kRowsOverLength && !fault.needs_ext_len &&
          GetParam().mode == ForwardMode::kTargetVerify) {
        continue;
      }
      for (const int step : {0, 1}) {
        form = (form + 1 + step) % 4;
        if (fault.selection && form % 2 == 0) continue;
        SCOPED_TRACE(fault.name + " in form " + std::to_string(form));
        Fault chosen = fault;
        chosen.selection = form % 2 == 1;
        const DsaConfig config = config_of_form(form);
        const Outcome spoiled = run(config, 1 + form / 2, chosen);
        expect_contained(spoiled, sound[static_cast<size_t>(form)]);
        expect_report(spoiled, fault, config);
      }
    }
  }

  static void expect_report(const Outcome& spoiled, const Fault& fault, const DsaConfig& config) {
    // Positions have no capacity.
    const bool is_seen = fault.reported != MetadataFault::kIndexRange || config.fuse_transform;
    for (const MetadataReport& report : spoiled.reports) {
      EXPECT_EQ(report.fault, is_seen ? fault.reported : MetadataFault::kNone) << to_string(report);
      const bool names_row = fault.reported == MetadataFault::kStoreSlot ||
                             fault.reported == MetadataFault::kIndexRange;
      if (report.fault != MetadataFault::kNone && !names_row) {
        EXPECT_EQ(report.request, kBad);
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Surfaces, DsaHostileContents, testing::ValuesIn(kSurfaces),
                         [](const auto& surface) { return surface.param.name; });

TEST_P(DsaHostileContents, LengthsHarmTheirOwnRequestOnly) { run_faults(length_faults()); }

TEST_P(DsaHostileContents, TablesHarmTheirOwnRequestOnly) { run_faults(table_faults()); }

TEST_P(DsaHostileContents, RowsHarmTheirOwnRequestOnly) { run_faults(row_faults()); }

// A request without keys, or whose rows see none, is empty rather than garbage.
TEST_P(DsaHostileContents, NegativeLengthsAndPoolRowsGiveEmptyRows) {
  const DsaConfig config = config_of(RowFormat::kV32, true);
  const std::vector<int> owners = row_owners(GetParam());
  for (const std::vector<Fault>& faults : {length_faults(), table_faults()}) {
    for (const Fault& fault : faults) {
      if (fault.reported != MetadataFault::kNegativeLength &&
          fault.reported != MetadataFault::kPoolRow) {
        continue;
      }
      const Outcome spoiled = run(config, 1, fault);
      for (size_t row = 0; row < owners.size(); ++row) {
        if (owners[row] != kBad) continue;
        EXPECT_TRUE(spoiled.is_empty_row(row)) << fault.name << ", row " << row;
      }
    }
  }
}

// Everything at once, of every request: nothing is compared but the padding, whose rows follow
// from the arrays that hold them.
TEST_P(DsaHostileContents, AnyContentsStayInBounds) {
  test::Rng rng(5);
  const auto damage = [&](Values& values) {
    for (int32_t& value : values) {
      const int32_t choices[] = {kMin, -1, 0, 1, 5, kWidth, kCapacity, kMax - 1, kMax};
      if (rng.integer(0, 2) == 0) value = choices[rng.integer(0, 8)];
    }
  };
  const std::vector<int> owners = row_owners(GetParam());
  for (int repeat = 0; repeat < 24; ++repeat) {
    const RowFormat format = repeat % 2 == 0 ? RowFormat::kV32 : RowFormat::kBf16;
    const Fault everything{
        "everything", MetadataFault::kNone,
        [&](Contents& c) {
          for (Values* const values : {&c.seq_len, &c.pool_row, &c.ext_len, &c.table, &c.positions,
                                       &c.out_cache_loc, &c.topk_indices}) {
            damage(*values);
          }
        },
        false, repeat % 3 == 0};
    const Outcome spoiled = run(config_of(format, repeat % 4 < 2), 1 + repeat % 2, everything);
    for (size_t row = 0; row < owners.size(); ++row) {
      if (owners[row] >= 0) continue;
      EXPECT_TRUE(spoiled.is_empty_row(row)) << "padding row " << row;
    }
  }
}

}  // namespace
}  // namespace fovea
