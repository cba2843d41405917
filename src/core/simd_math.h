// Vector exponential and hyperbolic tangent. Included after src/core/simd.h by *_cpu.cc files, once
// per instruction set, hence the guard of the same kind.

#if defined(FOVEA_CORE_SIMD_MATH_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CORE_SIMD_MATH_H_
#undef FOVEA_CORE_SIMD_MATH_H_
#else
#define FOVEA_CORE_SIMD_MATH_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::internal::HWY_NAMESPACE {

/// e^x of every lane, within 2^-22 relative where the result is a normal float. -inf and everything
/// below ln 2^-126.5 (about -87.7) give exactly 0, everything above ln 2^127.5 (about 88.4) gives
/// +inf, NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> exp_f32(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> d32;
  // e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2. The bounds give n = -127, whose
  // scale is 0, and n = 128, whose scale is infinite.
  const auto bounded = hn::Min(hn::Max(x, hn::Set(d, -88.0f)), hn::Set(d, 88.8f));
  const auto n = hn::NearestInt(hn::Mul(bounded, hn::Set(d, 1.44269504f)));
  const auto n_float = hn::ConvertTo(d, n);
  // ln 2 in two parts; the first has 9 significant bits, so n times it is exact without FMA too.
  auto r = hn::NegMulAdd(n_float, hn::Set(d, 0.693359375f), bounded);
  r = hn::NegMulAdd(n_float, hn::Set(d, -2.12194440e-4f), r);
  // (e^r - 1 - r) / r^2: minimax polynomial, relative error of the whole 2^-28.
  auto q = hn::Set(d, 0.00138143207239f);
  q = hn::MulAdd(q, r, hn::Set(d, 0.00836885106806f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.0416684010808f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.166665195241f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.499999933731f));
  const auto power = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), hn::Set(d, 1.0f));
  const auto scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(d32, 127))));
  // Which operand of a minimum survives a NaN depends on the instruction set: put it back.
  return hn::IfThenElse(hn::Eq(x, x), hn::Mul(power, scale), x);
}

/// tanh x of every lane, within 2^-21 relative; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> tanh_f32(D d, hn::Vec<D> x) {
  // Near 0, x + x^3 P(x^2) with the minimax P (2^-29), because the other form cancels there.
  const auto u = hn::Mul(x, x);
  auto p = hn::Set(d, -0.0062742394403f);
  p = hn::MulAdd(p, u, hn::Set(d, 0.021071678935f));
  p = hn::MulAdd(p, u, hn::Set(d, -0.05385230986f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.133325861377f));
  p = hn::MulAdd(p, u, hn::Set(d, -0.333333175596f));
  const auto near = hn::MulAdd(hn::Mul(p, u), x, x);
  const auto magnitude = hn::Abs(x);
  const auto e = exp_f32(d, hn::Add(magnitude, magnitude));
  const auto one = hn::Set(d, 1.0f);
  const auto far = hn::CopySign(hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one))), x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.55f)), near, far);
}

}  // namespace fovea::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once per instruction set
