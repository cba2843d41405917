#include "fovea/state_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "fovea/error.h"

namespace fovea {
namespace {

StatePoolConfig small_config() {
  StatePoolConfig config;
  config.num_layers = 2;
  config.num_slots = 5;
  config.num_value_heads = 3;
  config.head_dim_k = 8;
  config.head_dim_v = 4;
  config.window_shape = {3, 7};
  return config;
}

float* state_of(const StatePool& pool, int64_t layer, int64_t slot) {
  const TensorView view = pool.state(layer);
  return static_cast<float*>(view.data) + slot * view.stride[0];
}

TEST(StatePool, IsZeroAndItsLayersAreThoseOfTheWholeView) {
  for (const std::array<int64_t, 2> shape : {std::array<int64_t, 2>{3, 7}, {7, 3}}) {
    StatePoolConfig config = small_config();
    config.window_shape = shape;
    const StatePool pool(config, Device::cpu(1));
    const TensorView states = pool.states(), windows = pool.windows();
    EXPECT_EQ(states.shape[0], 2);
    EXPECT_EQ(states.shape[1], 5);
    EXPECT_EQ(windows.shape[2], shape[0]);
    EXPECT_EQ(windows.shape[3], shape[1]);
    for (int64_t layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(pool.state(layer).data,
                static_cast<float*>(states.data) + layer * states.stride[0]);
      EXPECT_EQ(pool.window(layer).data,
                static_cast<bf16_t*>(windows.data) + layer * windows.stride[0]);
      for (int64_t i = 0; i < 5 * 3 * 8 * 4; ++i) EXPECT_EQ(state_of(pool, layer, 0)[i], 0.0f);
    }
  }
}

TEST(StatePool, CopiesAndClearsASlotInEveryLayerAndNothingElse) {
  StatePool pool(small_config(), Device::cpu(1));
  for (int64_t layer = 0; layer < 2; ++layer) {
    std::memset(pool.state(layer).data, 1 + static_cast<int>(layer), 5 * 3 * 8 * 4 * 4);
    std::memset(pool.window(layer).data, 3 + static_cast<int>(layer), 5 * 3 * 7 * 2);
  }
  pool.clear(1);
  pool.copy(1, 4);
  for (int64_t layer = 0; layer < 2; ++layer) {
    for (int64_t slot = 0; slot < 5; ++slot) {
      const bool cleared = slot == 1 || slot == 4;
      const auto* state = reinterpret_cast<const uint8_t*>(state_of(pool, layer, slot));
      const auto* window = static_cast<const uint8_t*>(pool.window(layer).data) + slot * 3 * 7 * 2;
      EXPECT_EQ(state[0], cleared ? 0 : 1 + layer);
      EXPECT_EQ(state[3 * 8 * 4 * 4 - 1], cleared ? 0 : 1 + layer);
      EXPECT_EQ(window[0], cleared ? 0 : 3 + layer);
      EXPECT_EQ(window[3 * 7 * 2 - 1], cleared ? 0 : 3 + layer);
    }
  }
}

TEST(StatePool, HasNoWindowsWithoutChannels) {
  StatePoolConfig config = small_config();
  config.window_shape = {};
  config.state_dtype = DType::kBf16;
  StatePool pool(config, Device::cpu(1));
  EXPECT_FALSE(pool.windows().defined());
  EXPECT_FALSE(pool.window(1).defined());
  EXPECT_EQ(StatePool::slot_bytes(config), 2 * 3 * 8 * 4 * 2);
  pool.copy(0, 4);
}

TEST(StatePool, RefusesWhatItCannotHold) {
  const auto refused = [](auto change) {
    StatePoolConfig config = small_config();
    change(config);
    EXPECT_THROW(StatePool(config, Device::cpu(1)), Error);
  };
  refused([](auto& c) { c.num_layers = 0; });
  refused([](auto& c) { c.num_slots = 0; });
  refused([](auto& c) { c.head_dim_k = 257; });
  refused([](auto& c) { c.state_dtype = DType::kI32; });
  refused([](auto& c) { c.window_shape[1] = -1; });
  StatePool pool(small_config(), Device::cpu(1));
  EXPECT_THROW(pool.state(2), Error);
  EXPECT_THROW(pool.copy(0, 5), Error);
  EXPECT_THROW(pool.clear(-1), Error);
}

TEST(StatePool, MovesItsMemory) {
  StatePool pool(small_config(), Device::cpu(1));
  state_of(pool, 1, 2)[0] = 5.0f;
  StatePool other = std::move(pool);
  EXPECT_EQ(state_of(other, 1, 2)[0], 5.0f);
}

}  // namespace
}  // namespace fovea
