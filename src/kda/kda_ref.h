#pragma once

#include <cmath>
#include <cstdint>

#include "fovea/kda.h"
#include "src/core/access.h"
#include "src/core/workspace.h"
#include "src/kda/kda_math.h"
#include "src/kda/kda_rows.h"
#include "src/kda/kda_state.h"

/// The recurrence of KdaLayer in fp64, one token of one value head at a time: what every reference
/// of the room runs.
namespace fovea::internal {

/// Element (t, h, c) of a row tensor of either type, as a double.
class RowReader {
 public:
  explicit RowReader(const ConstTensorView& view)
      : data_(view.data),
        is_bf16_(view.dtype == DType::kBf16),
        row_stride_(view.stride[0]),
        head_stride_(view.rank == 3 ? view.stride[1] : 1) {}

  float operator()(int64_t t, int64_t h, int64_t c) const {
    const int64_t at = t * row_stride_ + h * head_stride_ + c;
    return is_bf16_ ? bf16_to_float(static_cast<const bf16_t*>(data_)[at])
                    : static_cast<const float*>(data_)[at];
  }

 private:
  const void* data_;
  bool is_bf16_;
  int64_t row_stride_, head_stride_;
};

/// Natural log decay of one channel; the sum g + dt_bias is defined in fp32.
inline double ref_log_decay(const KdaGate& gate, float g, float dt_bias, double rate) {
  return kda_log_decay(gate.kind, gate.lower_bound, static_cast<double>(g + dt_bias), rate);
}

/// One token of one value head, as the recurrence takes it.
struct RefToken {
  double* q = nullptr;          // [K], normalised where asked
  double* k = nullptr;          // [K]
  double* log_decay = nullptr;  // [K], natural
  double* decay = nullptr;      // [K], exp of it
  double* v = nullptr;          // [V]
  double beta = 0;

  static RefToken take(const KdaLayer& layer, WorkspaceCutter* cutter) {
    RefToken token;
    token.q = cutter->take<double>(layer.head_dim_k);
    token.k = cutter->take<double>(layer.head_dim_k);
    token.log_decay = cutter->take<double>(layer.head_dim_k);
    token.decay = cutter->take<double>(layer.head_dim_k);
    token.v = cutter->take<double>(layer.head_dim_v);
    return token;
  }
};

/// Reads tokens out of the row tensors of a call.
class RefInputs {
 public:
  RefInputs(const KdaLayer& layer, const KdaRows& rows)
      : layer_(layer),
        q_(rows.q),
        k_(rows.k),
        v_(rows.v),
        g_(rows.g),
        beta_(rows.beta),
        a_log_(access<const float, 1>(rows.a_log)),
        dt_bias_(access<const float, 2>(rows.dt_bias)) {}

  void read(int64_t t, int64_t value_head, RefToken* token) const {
    const int64_t head = value_head / (layer_.num_value_heads / layer_.num_heads);
    read_key(q_, t, head, token->q);
    read_key(k_, t, head, token->k);
    const double rate = a_log_ ? std::exp(static_cast<double>(a_log_(value_head))) : 1.0;
    for (int64_t c = 0; c < layer_.head_dim_k; ++c) {
      token->log_decay[c] = ref_log_decay(layer_.gate, g_(t, value_head, c),
                                          dt_bias_ ? dt_bias_(value_head, c) : 0.0f, rate);
      token->decay[c] = std::exp(token->log_decay[c]);
    }
    for (int64_t d = 0; d < layer_.head_dim_v; ++d) {
      token->v[d] = static_cast<double>(v_(t, value_head, d));
    }
    token->beta = kda_beta(layer_.beta_kind, layer_.allow_neg_eigval,
                           static_cast<double>(beta_(t, 0, value_head)));
  }

 private:
  void read_key(const RowReader& reader, int64_t t, int64_t head, double* out) const {
    double sum = 0;
    for (int64_t c = 0; c < layer_.head_dim_k; ++c) {
      out[c] = static_cast<double>(reader(t, head, c));
      sum += out[c] * out[c];
    }
    const double factor = layer_.normalise ? kda_inverse_norm(sum) : 1.0;
    for (int64_t c = 0; c < layer_.head_dim_k; ++c) out[c] *= factor;
  }

  const KdaLayer layer_;
  RowReader q_, k_, v_, g_, beta_;
  Accessor<const float, 1> a_log_;
  Accessor<const float, 2> dt_bias_;
};

/// Advances `state` [V][K] by one token; writes o to `out` [V] and, unless null, the correction to
/// `u` [V].
inline void ref_step(const KdaLayer& layer, const RefToken& token, double* state, double* out,
                     double* u = nullptr) {
  const double scale = kda_scale(layer);
  for (int64_t d = 0; d < layer.head_dim_v; ++d) {
    double* row = state + d * layer.head_dim_k;
    double recalled = 0;  // (S^T k)_d of the decayed state
    for (int64_t c = 0; c < layer.head_dim_k; ++c) {
      row[c] *= token.decay[c];
      recalled += row[c] * token.k[c];
    }
    const double correction = token.beta * (token.v[d] - recalled);
    double sum = 0;
    for (int64_t c = 0; c < layer.head_dim_k; ++c) {
      row[c] += token.k[c] * correction;
      sum += row[c] * token.q[c];
    }
    out[d] = scale * sum;
    if (u != nullptr) u[d] = correction;
  }
}

/// Reads one value head of a stored state into `state` [V][K]; entry -1: zero.
inline void ref_load(const KdaLayer& layer, const StateAccess& access, int64_t entry, int64_t head,
                     double* state) {
  for (int64_t d = 0; d < layer.head_dim_v; ++d) {
    for (int64_t c = 0; c < layer.head_dim_k; ++c) {
      state[d * layer.head_dim_k + c] =
          entry < 0 ? 0.0 : static_cast<double>(access.load(entry, head, d, c));
    }
  }
}

/// Stores it; entry -1: nothing.
inline void ref_store(const KdaLayer& layer, const StateAccess& access, int64_t entry, int64_t head,
                      const double* state) {
  if (entry < 0) return;
  for (int64_t d = 0; d < layer.head_dim_v; ++d) {
    for (int64_t c = 0; c < layer.head_dim_k; ++c) {
      access.store(entry, head, d, c, static_cast<float>(state[d * layer.head_dim_k + c]));
    }
  }
}

}  // namespace fovea::internal
