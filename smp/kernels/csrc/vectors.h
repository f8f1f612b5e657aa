// Vectors of 16 numbers in fp32, read from and written to fp32 and bf16: what the C++ kernels for CPUs share.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace {

inline long up(long n, long to) { return (n + to - 1) / to * to; }

// What differs between the two dtypes: how many elements lie in 32 bits, and how they are multiplied, read and written.
struct Float32 {
  static constexpr long PAIR = 1;
  using T = float;
  static __m512 fma(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  static __m512 load(const T* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
  static void store(T* x, __mmask16 mask, __m512 value) { _mm512_mask_storeu_ps(x, mask, value); }
};

struct BFloat16 {
  static constexpr long PAIR = 2;
  using T = uint16_t;
  static __m512 fma(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  static __m512 load(const T* x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
  }
  static void store(T* x, __mmask16 mask, __m512 value) {
    _mm256_mask_storeu_epi16(x, mask, (__m256i)_mm512_cvtneps_pbh(value));
  }
};

inline __mmask16 first(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

// exp(x) for x <= 104 within 1.5 units in the last place; 0 below -104, infinite above 89, NaN of NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-105.0f), x);  // in this order NaN stays
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(y, n);
}

}  // namespace
