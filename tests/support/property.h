#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <string>

namespace fovea::test {

/// Runs a rapidcheck property. The seed is fixed, so that a run can be repeated; RC_PARAMS=seed=N
/// or max_success=N in the environment changes it.
template <class Property>
testing::AssertionResult holds(const std::string& description, Property&& property) {
  setenv("RC_PARAMS", "seed=20240229", /*overwrite=*/0);  // read once, by the first check
  if (rc::check(description, std::forward<Property>(property))) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "property does not hold: " << description;
}

}  // namespace fovea::test
