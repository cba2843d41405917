#include "fovea/dsa_backend.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <string_view>

#include "fovea/error.h"
#include "fovea/index_cache.h"
#include "fovea/index_quantize.h"
#include "fovea/index_select.h"
#include "fovea/mha_varlen.h"
#include "fovea/row_codec.h"
#include "fovea/sparse_mla.h"
#include "src/batch/forward_modes.h"
#include "src/core/access.h"
#include "src/core/check.h"
#include "src/core/log.h"
#include "src/core/parallel.h"
#include "src/core/workspace.h"
#include "src/serving/dsa_checks.h"
#include "src/serving/dsa_dispatch.h"
#include "src/serving/dsa_profile.h"
#include "src/serving/dsa_shapes.h"
#include "src/serving/operator_options.h"
#include "src/serving/selection_map.h"

namespace fovea {
namespace {

using internal::kLatentWidth;
using internal::OperatorWork;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

MetadataProblem metadata_problem(const DsaConfig& config, ForwardMode mode) {
  MetadataProblem problem;
  problem.mode = mode;
  problem.max_requests = config.max_requests;
  problem.max_rows = config.max_rows;
  problem.table_width = config.table_width;
  problem.rows_per_request = config.rows_per_request;
  problem.topk = config.topk;
  problem.page_size = config.page_size;
  // row_offset costs one array and is then there for the contiguous kernel.
  problem.transform = internal::is_extend(mode) ? IndexTransform::kRagged : IndexTransform::kPaged;
  return problem;
}

std::vector<MetadataRefresh> refresh_plans_of_all_modes(const DsaConfig& config,
                                                        const Device& device,
                                                        const Options& options) {
  std::vector<MetadataRefresh> plans;
  for (int i = 0; internal::is_known(static_cast<ForwardMode>(i)); ++i) {
    const MetadataProblem problem = metadata_problem(config, static_cast<ForwardMode>(i));
    plans.push_back(MetadataRefresh::plan(problem, device, options));
  }
  return plans;
}

RowCodecProblem codec_problem(const DsaConfig& config, int64_t max_rows) {
  RowCodecProblem problem;
  problem.max_rows = max_rows;
  problem.row_format = config.row_format;
  problem.page_size = config.page_size;
  problem.width = kLatentWidth;
  problem.scale_mode = config.kv_scale_mode;
  return problem;
}

IndexQuantizeProblem quantize_problem(const DsaConfig& config) {
  IndexQuantizeProblem problem;
  problem.max_rows = config.max_rows;
  problem.num_heads = config.index_heads;
  problem.head_dim = config.index_dim;
  problem.rope_dim = config.rope_dim;
  problem.rope_style = config.index_rope_style;
  problem.hadamard = config.hadamard;
  problem.scale_mode = config.index_scale_mode;
  return problem;
}

IndexSelectProblem select_problem(const DsaConfig& config, IndexTransform transform) {
  IndexSelectProblem problem;
  problem.layout = IndexLayout::kPaged;
  problem.max_rows = config.max_rows;
  problem.max_width = config.table_width;
  problem.num_heads = config.index_heads;
  problem.head_dim = config.index_dim;
  problem.topk = config.topk;
  problem.transform = config.fuse_transform ? transform : IndexTransform::kLocal;
  problem.page_size = config.page_size;
  problem.logits_budget_bytes = config.logits_budget_bytes;
  return problem;
}

SparseMlaProblem attention_problem(const DsaConfig& config, const DsaLayer& layer,
                                   bool contiguous) {
  SparseMlaProblem problem;
  problem.max_rows = config.max_rows;
  problem.num_heads = config.num_heads;
  problem.head_dim_qk = kLatentWidth;
  problem.topk = config.topk;
  problem.softmax_scale = layer.softmax_scale;
  problem.logit_cap = layer.logit_cap;
  problem.row_format = contiguous ? RowFormat::kBf16 : config.row_format;
  problem.page_size = contiguous ? 0 : config.page_size;
  return problem;
}

MhaVarlenProblem mha_problem(const DsaConfig& config, const DsaLayer& layer) {
  MhaVarlenProblem problem;
  problem.max_rows = config.max_rows;
  problem.max_keys = config.mha_chunk_capacity;
  problem.max_requests = config.max_requests;
  problem.num_heads = config.num_heads;
  problem.softmax_scale = layer.softmax_scale;
  return problem;
}

// The attention of one (softmax_scale, logit_cap).
struct AttentionPlans {
  DsaLayer layer;
  SparseMla cache_direct;
  std::optional<SparseMla> contiguous;
  std::optional<MhaVarlen> one_shot;
};

// The arrays that live from step to step, at the bounds of the configuration.
struct StepBuffers {
  MetadataFields fields;
  TensorView q_fp8, q_scale, head_weight;  // index queries
  TensorView k_fp8, k_scale;               // new index keys
  TensorView selection;                    // result of the indexer
  TensorView slots;                        // without fuse_transform: the mapped selection
  TensorView contiguous_slots, contiguous_rows;
  TensorView store_slots;  // out_cache_loc without the rows of no request

  StepBuffers(const DsaConfig& config, Workspace memory, size_t* bytes) {
    internal::WorkspaceCutter cutter(memory);
    const auto array = [&](DType dtype, std::initializer_list<int64_t> shape) {
      TensorView view = make_tensor(static_cast<void*>(nullptr), dtype, shape);
      view.data = cutter.take<uint8_t>(view.num_elements() * static_cast<int64_t>(size_of(dtype)));
      return view;
    };
    const int64_t requests = config.max_requests, rows = config.max_rows;
    fields.kv_len = array(DType::kI32, {requests});
    fields.kv_indptr = array(DType::kI32, {requests + 1});
    fields.max_kv_len = array(DType::kI32, {1});
    fields.q_indptr = array(DType::kI32, {requests + 1});
    fields.max_q_len = array(DType::kI32, {1});
    fields.page_table =
        array(DType::kI32, {requests, ceil_div(config.table_width, config.page_size)});
    fields.row_to_request = array(DType::kI32, {rows});
    fields.row_len = array(DType::kI32, {rows});
    fields.topk_length = array(DType::kI32, {rows});
    fields.topk_indptr = array(DType::kI32, {rows + 1});
    fields.ext_len = array(DType::kI32, {requests});
    fields.k_start = array(DType::kI32, {rows});
    fields.k_end = array(DType::kI32, {rows});
    fields.row_offset = array(DType::kI32, {rows});
    fields.schedule = array(DType::kI32, {MetadataProblem{}.workers + 1, 2});
    q_fp8 = array(DType::kU8, {rows, config.index_heads, config.index_dim});
    q_scale = array(DType::kF32, {rows, config.index_heads});
    head_weight = array(DType::kF32, {rows, config.index_heads});
    k_fp8 = array(DType::kU8, {rows, config.index_dim});
    k_scale = array(DType::kF32, {rows});
    selection = array(DType::kI32, {rows, config.topk});
    if (!config.fuse_transform) slots = array(DType::kI32, {rows, config.topk});
    if (internal::may_run_contiguous(config)) {
      contiguous_slots = array(DType::kI32, {config.mha_chunk_capacity});
      contiguous_rows = array(DType::kBf16, {config.mha_chunk_capacity, kLatentWidth});
    }
    store_slots = array(DType::kI32, {rows});
    *bytes = cutter.used_bytes();
  }
};

}  // namespace

struct DsaBackend::State {
  DsaConfig config;
  Device device;
  internal::OperatorOptions options;
  std::vector<MetadataRefresh> refresh_plans;  // by mode
  PackRows pack;
  std::optional<UnpackRows> unpack;
  IndexQuantize quantize;
  IndexStore store;
  IndexSelect select;
  std::optional<IndexSelect> select_ragged;
  std::vector<AttentionPlans> attention;
  HostBuffer memory;
  std::optional<StepBuffers> buffers;
  HostBuffer workspace;
  std::vector<OperatorCall>* profile = nullptr;

  // The current step.
  bool begun = false;
  ForwardBatch batch;
  DsaDispatch dispatch;
  internal::StepShape shape;
  MetadataFields fields;  // views of the live shapes

  State(const DsaConfig& config_in, const Device& device_in);

  template <class Plan>
  void call(const char* name, const Plan& plan, const typename Plan::Tensors& tensors,
            internal::FunctionRef<OperatorWork()> work);
  template <class Plan>
  std::string_view run_next(const char* name, const Plan& failed,
                            const typename Plan::Tensors& tensors, const Error& error);
  void timed(const char* name, internal::FunctionRef<std::string_view()> run,
             internal::FunctionRef<OperatorWork()> work);
  const AttentionPlans& attention_of(const DsaLayer& layer);
  MetadataFields live_fields(const ForwardBatch& next, const internal::StepShape& next_shape) const;
  void refresh(const ForwardBatch& next, const MetadataFields& next_fields);

  void store_rows(const DsaForwardTensors& tensors);
  void quantize_index(const DsaForwardTensors& tensors, bool scores);
  ConstTensorView select_rows(const DsaForwardTensors& tensors);
  void map_rows(const ConstTensorView& positions, IndexTransform transform,
                const TensorView& indices);
  void attend(const AttentionPlans& plans, const DsaForwardTensors& tensors,
              const ConstTensorView& indices);
  void attend_one_shot(const AttentionPlans& plans, const DsaForwardTensors& tensors);

  template <class View>
  View live(const View& tensor) const {
    return slice_rows(tensor, 0, shape.num_rows);
  }
};

DsaBackend::State::State(const DsaConfig& config_in, const Device& device_in)
    : config((internal::check_dsa_config(config_in, device_in), config_in)),
      device(device_in),
      options(internal::kDsaOp, config.implementation),
      refresh_plans(refresh_plans_of_all_modes(config, device, options("metadata_refresh"))),
      pack(PackRows::plan(codec_problem(config, config.max_rows), device, options("pack_rows"))),
      quantize(IndexQuantize::plan(quantize_problem(config), device, options("index_quantize"))),
      store(IndexStore::plan({config.max_rows, config.index_dim, config.page_size}, device,
                             options("index_store"))),
      select(IndexSelect::plan(select_problem(config, IndexTransform::kPaged), device,
                               options("index_select"))) {
  size_t bytes = std::max({pack.workspace_bytes(), quantize.workspace_bytes(),
                           store.workspace_bytes(), select.workspace_bytes()});
  for (const auto& plan : refresh_plans) bytes = std::max(bytes, plan.workspace_bytes());
  if (internal::may_run_contiguous(config)) {
    unpack = UnpackRows::plan(codec_problem(config, config.mha_chunk_capacity), device,
                              options("unpack_rows"));
    select_ragged = IndexSelect::plan(select_problem(config, IndexTransform::kRagged), device,
                                      options("index_select"));
    bytes = std::max({bytes, unpack->workspace_bytes(), select_ragged->workspace_bytes()});
  }
  workspace.reserve(bytes);
  size_t buffer_bytes = 0;
  StepBuffers(config, {}, &buffer_bytes);
  memory.reserve(buffer_bytes);
  buffers.emplace(config, memory.workspace(), &buffer_bytes);
  // Refuses now what attention would refuse at the first forward. Layers usually share one scale.
  attention.reserve(8);
  attention_of({0, 1.0f, 0.0f});
  attention.clear();
}

const AttentionPlans& DsaBackend::State::attention_of(const DsaLayer& layer) {
  for (const AttentionPlans& plans : attention) {
    if (plans.layer.softmax_scale == layer.softmax_scale &&
        plans.layer.logit_cap == layer.logit_cap) {
      return plans;
    }
  }
  AttentionPlans plans{
      layer,
      SparseMla::plan(attention_problem(config, layer, false), device, options("sparse_mla")),
      {},
      {}};
  size_t bytes = plans.cache_direct.workspace_bytes();
  if (internal::may_run_contiguous(config)) {
    plans.contiguous =
        SparseMla::plan(attention_problem(config, layer, true), device, options("sparse_mla"));
    bytes = std::max(bytes, plans.contiguous->workspace_bytes());
  }
  if (internal::may_run_one_shot(config)) {
    plans.one_shot = MhaVarlen::plan(mha_problem(config, layer), device, options("mha_varlen"));
    bytes = std::max(bytes, plans.one_shot->workspace_bytes());
  }
  workspace.reserve(bytes);
  attention.push_back(std::move(plans));
  return attention.back();
}

// `run` returns the name of the implementation that ran.
void DsaBackend::State::timed(const char* name, internal::FunctionRef<std::string_view()> run,
                              internal::FunctionRef<OperatorWork()> work) {
  if (profile == nullptr) {
    run();
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  const std::string_view implementation = run();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - begin;
  const OperatorWork done = work();
  profile->push_back({name, std::string(implementation), elapsed.count(), done.flops, done.bytes});
}

template <class Plan>
void DsaBackend::State::call(const char* name, const Plan& plan,
                             const typename Plan::Tensors& tensors,
                             internal::FunctionRef<OperatorWork()> work) {
  const auto run = [&]() -> std::string_view {
    try {
      plan.run(tensors, workspace.workspace());
    } catch (const Error& error) {
      return run_next(name, plan, tensors, error);
    }
    return plan.implementation().name;
  };
  timed(name, run, work);
}

// After a failed run, the next implementation of the list from the same tensors: whatever a failed
// run wrote, a complete one writes again. Called while the error is handled.
template <class Plan>
std::string_view DsaBackend::State::run_next(const char* name, const Plan& failed,
                                             const typename Plan::Tensors& tensors,
                                             const Error& error) {
  const bool failure = error.code() == ErrorCode::kDevice || error.code() == ErrorCode::kInternal;
  const std::string* const next = options.next(name, failed.implementation().name);
  if (!failure || next == nullptr || config.strict || config.deterministic ||
      !config.implementation.empty()) {
    throw;
  }
  internal::log(LogLevel::kError, std::string(name) + ": " + failed.implementation().name +
                                      " failed (" + error.what() + "); runs " + *next);
  const Plan plan = Plan::plan(failed.problem(), device, Options{*next});
  workspace.reserve(plan.workspace_bytes());
  try {
    plan.run(tensors, workspace.workspace());
  } catch (const Error& again) {
    return run_next(name, plan, tensors, again);
  }
  return *next;
}

// Arrays of rows take exactly E or T entries: what the device lengths say beyond that is cut.
MetadataFields DsaBackend::State::live_fields(const ForwardBatch& next,
                                              const internal::StepShape& next_shape) const {
  const int64_t requests = next.seq_len.shape[0];
  const int64_t rows = next_shape.num_rows, padded = next_shape.padded_rows;
  const MetadataFields& all = buffers->fields;
  MetadataFields views;
  views.kv_len = slice_rows(all.kv_len, 0, requests);
  views.kv_indptr = slice_rows(all.kv_indptr, 0, requests + 1);
  views.max_kv_len = all.max_kv_len;
  views.q_indptr = slice_rows(all.q_indptr, 0, requests + 1);
  views.max_q_len = all.max_q_len;
  views.page_table = slice_rows(all.page_table, 0, requests);
  views.row_to_request = slice_rows(all.row_to_request, 0, padded);
  // One row per request: its length is the request's.
  views.row_len = internal::is_decode(next.mode) ? views.kv_len : slice_rows(all.row_len, 0, rows);
  views.topk_length = slice_rows(all.topk_length, 0, padded);
  views.topk_indptr = slice_rows(all.topk_indptr, 0, padded + 1);
  views.ext_len = slice_rows(all.ext_len, 0, requests);
  if (internal::is_extend(next.mode)) {
    views.k_start = slice_rows(all.k_start, 0, rows);
    views.k_end = slice_rows(all.k_end, 0, rows);
    views.row_offset = slice_rows(all.row_offset, 0, rows);
  } else {
    views.schedule = all.schedule;
  }
  return views;
}

void DsaBackend::State::refresh(const ForwardBatch& next, const MetadataFields& next_fields) {
  MetadataTensors tensors;
  tensors.seq_len = next.seq_len;
  tensors.pool_row = next.pool_row;
  tensors.req_to_token = next.req_to_token;
  tensors.ext_len = next.ext_len;
  tensors.steps[0] = next_fields;
  call("metadata_refresh", refresh_plans[static_cast<size_t>(next.mode)], tensors,
       [&] { return internal::metadata_work(config, next_fields); });
}

void DsaBackend::State::quantize_index(const DsaForwardTensors& tensors, bool scores) {
  const bool stores = tensors.index_k.defined();
  if (!scores && !stores) return;
  IndexQuantizeTensors in;
  in.positions = live(batch.positions);
  in.cos_sin = tensors.cos_sin;
  if (scores) {
    in.q = live(tensors.index_q);
    in.head_gate = live(tensors.head_gate);
    in.q_fp8 = live(buffers->q_fp8);
    in.q_scale = live(buffers->q_scale);
    in.head_weight = live(buffers->head_weight);
  }
  if (stores) {
    in.k = live(tensors.index_k);
    in.norm_weight = tensors.norm_weight;
    in.norm_bias = tensors.norm_bias;
    in.k_fp8 = live(buffers->k_fp8);
    in.k_scale = live(buffers->k_scale);
  }
  call("index_quantize", quantize, in,
       [&] { return internal::index_quantize_work(config, shape.num_rows, scores, stores); });
}

void DsaBackend::State::store_rows(const DsaForwardTensors& tensors) {
  const ConstTensorView slots = batch.mode == ForwardMode::kDraftExtend ? live(buffers->store_slots)
                                                                        : live(batch.out_cache_loc);
  if (tensors.k.defined()) {
    call("pack_rows", pack, {live(tensors.k), slots, tensors.kv_pool},
         [&] { return internal::pack_rows_work(config, shape.num_rows); });
  }
  if (tensors.index_k.defined()) {
    call("index_store", store,
         {live(buffers->k_fp8), live(buffers->k_scale), slots, tensors.index_pool},
         [&] { return internal::index_store_work(config, shape.num_rows); });
  }
}

void DsaBackend::State::map_rows(const ConstTensorView& positions, IndexTransform transform,
                                 const TensorView& indices) {
  internal::SelectionMap map;
  map.transform = transform;
  map.page_size = config.page_size;
  map.positions = positions;
  map.row_len = fields.row_len;
  map.page_table = fields.page_table;
  map.row_to_request = fields.row_to_request;
  map.row_offset = fields.row_offset;
  map.indices = indices;
  timed(
      "map_selection",
      [&]() -> std::string_view {
        internal::map_selection(map, device);
        return "cpu";
      },
      [&] { return internal::map_selection_work(config, shape.num_rows); });
}

// The selection in the form that attention reads, [T, K].
ConstTensorView DsaBackend::State::select_rows(const DsaForwardTensors& tensors) {
  const IndexTransform target = dispatch.transform;
  const int64_t padded = shape.padded_rows;
  const TensorView selection =
      tensors.indices.defined() ? tensors.indices : slice_rows(buffers->selection, 0, padded);
  if (tensors.topk_indices.defined()) {
    if (config.fuse_transform) return tensors.topk_indices;
    map_rows(tensors.topk_indices, target, slice_rows(buffers->slots, 0, padded));
    return slice_rows(buffers->slots, 0, padded);
  }
  const IndexTransform own = config.fuse_transform ? target : IndexTransform::kLocal;
  if (dispatch.skip_selection) {
    map_rows({}, own, selection);
  } else {
    IndexSelectTensors in;
    in.q_fp8 = live(buffers->q_fp8);
    in.head_weight = live(buffers->head_weight);
    in.index_pool = tensors.index_pool;
    in.page_table = fields.page_table;
    in.row_to_request = live(fields.row_to_request);
    in.row_len = fields.row_len;
    if (own == IndexTransform::kRagged) in.row_offset = fields.row_offset;
    in.schedule = fields.schedule;
    in.indices = selection;  // rows of padding become -1
    call("index_select", own == IndexTransform::kRagged ? *select_ragged : select, in,
         [&] { return internal::index_select_work(config, fields); });
  }
  if (config.fuse_transform) return selection;
  map_rows(selection, target, slice_rows(buffers->slots, 0, padded));
  return slice_rows(buffers->slots, 0, padded);
}

void DsaBackend::State::attend(const AttentionPlans& plans, const DsaForwardTensors& tensors,
                               const ConstTensorView& indices) {
  SparseMlaTensors in;
  in.q = tensors.q;
  in.kv = tensors.kv_pool;
  in.indices = indices;
  in.topk_length = fields.topk_length;
  in.out = tensors.out;
  in.lse = tensors.lse;
  if (dispatch.kernel != DsaKernel::kContiguousBf16) {
    const int64_t row_bytes = internal::latent_row_bytes(config);
    call("sparse_mla", plans.cache_direct, in,
         [&] { return internal::sparse_mla_work(config, fields, row_bytes); });
    return;
  }
  if (dispatch.fresh_kv) {
    in.kv = live(tensors.k);
  } else {
    const TensorView slots = slice_rows(buffers->contiguous_slots, 0, shape.sum_kv_len);
    const TensorView rows = slice_rows(buffers->contiguous_rows, 0, shape.sum_kv_len);
    internal::list_slots(fields.page_table, fields.kv_indptr, config.page_size, slots, device);
    call("unpack_rows", *unpack, {tensors.kv_pool, slots, rows},
         [&] { return internal::unpack_rows_work(config, fields); });
    in.kv = rows;
  }
  call("sparse_mla", *plans.contiguous, in,
       [&] { return internal::sparse_mla_work(config, fields, 2 * kLatentWidth); });
}

void DsaBackend::State::attend_one_shot(const AttentionPlans& plans,
                                        const DsaForwardTensors& tensors) {
  MhaVarlenTensors in;
  in.q = tensors.q_mha;
  in.k = tensors.k_mha;
  in.v = tensors.v_mha;
  in.q_indptr = fields.q_indptr;
  in.kv_indptr = fields.kv_indptr;
  in.out = tensors.out_mha;
  in.lse = tensors.lse;
  call("mha_varlen", *plans.one_shot, in,
       [&] { return internal::mha_varlen_work(config, fields); });
  // The operator leaves rows without a request alone.
  const auto out = internal::access<bf16_t, 3>(tensors.out_mha);
  const auto lse = internal::access<float, 2>(tensors.lse);
  const auto q_indptr = internal::access<const int32_t, 1>(fields.q_indptr);
  for (int64_t row = q_indptr(q_indptr.shape[0] - 1); row < shape.padded_rows; ++row) {
    for (int64_t h = 0; h < config.num_heads; ++h) {
      std::fill_n(out.row(row, h), internal::kMhaWidthV, bf16_t{0});
    }
    std::fill_n(lse.row(row), config.num_heads, -std::numeric_limits<float>::infinity());
  }
}

DsaBackend::DsaBackend(const DsaConfig& config, const Device& device)
    : state_(std::make_unique<State>(config, device)) {}
DsaBackend::~DsaBackend() = default;
DsaBackend::DsaBackend(DsaBackend&&) noexcept = default;
DsaBackend& DsaBackend::operator=(DsaBackend&&) noexcept = default;

void DsaBackend::begin_step(const ForwardBatch& batch) {
  State& state = *state_;
  internal::check_forward_batch(state.config, batch);
  const DsaBatchFacts facts = internal::batch_facts(state.config, batch);
  const DsaDispatch dispatch = dsa_dispatch(state.config, state.device, facts);
  const internal::StepShape shape{batch.num_rows, std::max(batch.num_rows, batch.padded_rows),
                                  facts.sum_kv_len};
  const MetadataFields fields = state.live_fields(batch, shape);
  state.refresh(batch, fields);
  state.batch = batch;
  state.dispatch = dispatch;
  state.shape = shape;
  state.fields = fields;
  if (dispatch.transform != IndexTransform::kRagged) state.fields.row_offset = {};
  if (batch.mode == ForwardMode::kDraftExtend) {
    // num_rows may be a bound: what lies behind the last request must not be stored.
    internal::mask_slots(fields.row_to_request, batch.out_cache_loc,
                         state.live(state.buffers->store_slots));
  }
  state.begun = true;
}

void DsaBackend::forward(const DsaLayer& layer, const DsaForwardTensors& tensors) {
  State& state = *state_;
  if (!state.begun) internal::invalid(internal::kDsaOp, "forward without begin_step");
  internal::check_forward_tensors(state.config, state.dispatch, state.shape, layer, tensors);
  const AttentionPlans& plans = state.attention_of(layer);
  const bool scores = !state.dispatch.skip_selection && !tensors.topk_indices.defined();
  state.quantize_index(tensors, scores);
  state.store_rows(tensors);
  const bool one_shot = state.dispatch.one_shot;
  if (one_shot && !tensors.indices.defined()) {
    state.attend_one_shot(plans, tensors);
    return;
  }
  const ConstTensorView indices = state.select_rows(tensors);
  if (one_shot)
    state.attend_one_shot(plans, tensors);
  else
    state.attend(plans, tensors, indices);
}

const DsaConfig& DsaBackend::config() const noexcept { return state_->config; }
const DsaDispatch& DsaBackend::dispatch() const noexcept { return state_->dispatch; }
const MetadataFields& DsaBackend::metadata() const noexcept { return state_->fields; }
void DsaBackend::set_profile(std::vector<OperatorCall>* calls) noexcept { state_->profile = calls; }

}  // namespace fovea
