// Operations on rows on a CPU with AVX-512: softmax statistics and gradient of logits, norms, SwiGLU, RoPE; see
// smp/kernels/cpp/ for who calls them, and docs/kernels.md for what they gain.
//
// Each reads its tensors once, or twice where the second time finds a row in the cache, computes in fp32 and rounds when
// it stores. Elements of a row are neighbours. Sums have an order that depends on the sizes alone: the same bits with any
// number of threads.

#include <algorithm>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr float LOWEST = -3.4e38f;  // in place of -inf as the largest logit: a difference to it is a number
constexpr long BLOCK = 2048;        // logits that are summed before the sum is added to that of the row
constexpr long PARTS = 64;          // most partial sums of a norm's gradients
constexpr long PART_ROWS = 8;       // fewest rows of one
constexpr long ALONE = 1 << 14;     // elements that one thread computes before others have begun

__m512 widen(float x) { return _mm512_set1_ps(x); }

// f(row) for all rows, each thread some that follow each other.
template <class F>
void each(long rows, long width, long threads, F f) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > ALONE)
  for (long row = 0; row < rows; row++) f(row);
}

// f(column, which of the 16 columns from there on exist).
template <class F>
void columns(long width, F f) {
  long c = 0;
  for (; c + 16 <= width; c += 16) f(c, (__mmask16)0xffff);
  if (c < width) f(c, first(width - c));
}

// The largest logit, and the logarithm of the sum of exponentials relative to it.
template <class E>
void softmax_row(const typename E::T* z, long valid, float* peak, float* log_sum) {
  __m512 most = widen(LOWEST), others = most;
  long c = 0;
  for (; c + 32 <= valid; c += 32) {
    most = _mm512_max_ps(most, E::load(z + c, 0xffff));
    others = _mm512_max_ps(others, E::load(z + c + 16, 0xffff));
  }
  for (; c < valid; c += 16)
    most = _mm512_mask_max_ps(most, first(valid - c), most, E::load(z + c, first(valid - c)));
  *peak = _mm512_reduce_max_ps(_mm512_max_ps(most, others));
  __m512 shift = widen(*peak), total = _mm512_setzero_ps();
  for (long from = 0; from < valid; from += BLOCK) {
    long to = std::min(valid, from + BLOCK);
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (c = from; c + 32 <= to; c += 32) {
      even = _mm512_add_ps(even, exponential(_mm512_sub_ps(E::load(z + c, 0xffff), shift)));
      odd = _mm512_add_ps(odd, exponential(_mm512_sub_ps(E::load(z + c + 16, 0xffff), shift)));
    }
    for (; c < to; c += 16) {
      __mmask16 there = first(to - c);
      even = _mm512_mask_add_ps(even, there, even, exponential(_mm512_sub_ps(E::load(z + c, there), shift)));
    }
    total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
  }
  *log_sum = std::log(_mm512_reduce_add_ps(total));
}

template <class E>
void softmax_stats(const void* logits, const int64_t* ids, float* stats, long rows, long valid, long stride, long threads) {
  each(rows, valid, threads, [=](long row) {
    const auto* z = (const typename E::T*)logits + row * stride;
    softmax_row<E>(z, valid, stats + row, stats + rows + row);
    bool here = ids[row] >= 0 && ids[row] < valid;
    stats[2 * rows + row] = here ? _mm512_cvtss_f32(E::load(z + ids[row], 1)) : 0.0f;
  });
}

template <class E>
void logits_to_gradient(void* logits, const int64_t* ids, const float* stats, const float* weights, long rows, long width,
                        long valid, long stride, long threads) {
  each(rows, width, threads, [=](long row) {
    auto* z = (typename E::T*)logits + row * stride;
    __m512 peak = widen(stats[row]), log_sum = widen(stats[rows + row]), weight = widen(weights[row]);
    // In two subtractions: their sum would round away the small one.
    auto probability = [&](__m512 x) { return exponential(_mm512_sub_ps(_mm512_sub_ps(x, peak), log_sum)); };
    long id = ids[row];
    bool here = id >= 0 && id < valid;
    // Of the target before it is written over.
    __m512 target = here ? _mm512_sub_ps(_mm512_mul_ps(probability(E::load(z + id, 1)), weight), weight) : weight;
    columns(valid, [&](long c, __mmask16 there) {
      E::store(z + c, there, _mm512_mul_ps(probability(E::load(z + c, there)), weight));
    });
    if (here) E::store(z + id, 1, target);
    std::memset(z + valid, 0, (width - valid) * sizeof(*z));
  });
}

template <class E>
void norm(const void* xs, const void* residuals, const float* weight, const float* bias, void* ys, void* totals,
          float* means, float* scales, long rows, long width, float eps, long threads) {
  using T = typename E::T;
#pragma omp parallel num_threads(threads) if (rows * width > ALONE)
  {
    std::vector<float> wide(up(width, 16));
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
      const T* x = (const T*)xs + row * width;
      const T* residual = residuals ? (const T*)residuals + row * width : nullptr;
      T* y = (T*)ys + row * width;
      T* total = (T*)totals + row * width;
      __m512 sum = _mm512_setzero_ps(), squares = sum;
      columns(width, [&](long c, __mmask16 there) {
        __m512 v = E::load(x + c, there);
        if (residual) {
          // What is normalized is the rounded sum, as without fusion.
          E::store(total + c, there, _mm512_add_ps(v, E::load(residual + c, there)));
          v = E::load(total + c, there);
        }
        _mm512_storeu_ps(wide.data() + c, v);
        sum = _mm512_add_ps(sum, v);
        squares = _mm512_fmadd_ps(v, v, squares);
      });
      if (bias) {
        means[row] = _mm512_reduce_add_ps(sum) / width;
        __m512 mean = widen(means[row]);
        squares = _mm512_setzero_ps();
        columns(width, [&](long c, __mmask16 there) {
          __m512 v = _mm512_maskz_sub_ps(there, _mm512_loadu_ps(wide.data() + c), mean);
          _mm512_storeu_ps(wide.data() + c, v);
          squares = _mm512_fmadd_ps(v, v, squares);
        });
      }
      scales[row] = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps);
      __m512 scale = widen(scales[row]);
      columns(width, [&](long c, __mmask16 there) {
        __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(wide.data() + c), scale), Float32::load(weight + c, there));
        E::store(y + c, there, bias ? _mm512_add_ps(v, Float32::load(bias + c, there)) : v);
      });
    }
  }
}

long parts_of(long rows) { return std::max(1L, std::min(PARTS, rows / PART_ROWS)); }

// Rows [from, to) of a norm's backward pass: dx, and sums of these rows for the gradients of weight and bias.
template <class E>
void norm_gradient_part(const void* dys, const void* dtotals, const void* xs, const float* weight, const float* means,
                        const float* scales, void* dxs, float* dweight, float* dbias, long from, long to, long width,
                        float* normal, float* change) {
  using T = typename E::T;
  std::memset(dweight, 0, width * sizeof(float));
  if (dbias) std::memset(dbias, 0, width * sizeof(float));
  for (long row = from; row < to; row++) {
    const T *dy = (const T*)dys + row * width, *x = (const T*)xs + row * width;
    T* dx = (T*)dxs + row * width;
    __m512 scale = widen(scales[row]), mean = widen(dbias ? means[row] : 0.0f);
    __m512 along = _mm512_setzero_ps(), sum = along;
    columns(width, [&](long c, __mmask16 there) {
      __m512 n = _mm512_maskz_mul_ps(there, _mm512_sub_ps(E::load(x + c, there), mean), scale), d = E::load(dy + c, there);
      Float32::store(dweight + c, there, _mm512_fmadd_ps(d, n, Float32::load(dweight + c, there)));
      if (dbias) Float32::store(dbias + c, there, _mm512_add_ps(d, Float32::load(dbias + c, there)));
      d = _mm512_mul_ps(d, Float32::load(weight + c, there));
      along = _mm512_fmadd_ps(n, d, along);
      sum = _mm512_add_ps(sum, d);
      _mm512_storeu_ps(normal + c, n);
      _mm512_storeu_ps(change + c, d);
    });
    __m512 on_normal = widen(_mm512_reduce_add_ps(along) / width);
    __m512 on_all = widen(dbias ? _mm512_reduce_add_ps(sum) / width : 0.0f);
    columns(width, [&](long c, __mmask16 there) {
      __m512 d = _mm512_fnmadd_ps(_mm512_loadu_ps(normal + c), on_normal, _mm512_loadu_ps(change + c));
      d = _mm512_mul_ps(_mm512_sub_ps(d, on_all), scale);
      if (dtotals) d = _mm512_add_ps(d, E::load((const T*)dtotals + row * width + c, there));
      E::store(dx + c, there, d);
    });
  }
}

template <class E>
void norm_gradient(const void* dy, const void* dtotal, const void* x, const float* weight, const float* means,
                   const float* scales, void* dx, float* dweight, float* dbias, float* sums, long rows, long width,
                   long threads) {
  long parts = parts_of(rows);
  float* of_bias = dbias ? sums + parts * width : nullptr;
#pragma omp parallel num_threads(threads) if (rows * width > ALONE)
  {
    std::vector<float> normal(up(width, 16)), change(up(width, 16));
#pragma omp for schedule(static)
    for (long p = 0; p < parts; p++)
      norm_gradient_part<E>(dy, dtotal, x, weight, means, scales, dx, sums + p * width,
                            of_bias ? of_bias + p * width : nullptr, p * rows / parts, (p + 1) * rows / parts, width,
                            normal.data(), change.data());
  }
  for (float* to : {dweight, dbias}) {
    if (!to) continue;
    const float* from = to == dweight ? sums : of_bias;
    columns(width, [&](long c, __mmask16 there) {
      __m512 total = _mm512_setzero_ps();
      for (long p = 0; p < parts; p++) total = _mm512_add_ps(total, Float32::load(from + p * width + c, there));
      Float32::store(to + c, there, total);
    });
  }
}

__m512 sigmoid(__m512 x) {
  // exp(104) is infinite, so that of x below -89 there is 0 left and nothing that a large factor makes visible; in this
  // order NaN stays.
  __m512 e = exponential(_mm512_min_ps(widen(104.0f), _mm512_sub_ps(_mm512_setzero_ps(), x)));
  return _mm512_div_ps(widen(1.0f), _mm512_add_ps(widen(1.0f), e));
}

template <class E>
void swiglu(const void* gates, const void* ups, void* outs, long rows, long width, long gate_stride, long up_stride,
            long threads) {
  using T = typename E::T;
  each(rows, width, threads, [=](long row) {
    const T *gate = (const T*)gates + row * gate_stride, *up = (const T*)ups + row * up_stride;
    T* out = (T*)outs + row * width;
    columns(width, [&](long c, __mmask16 there) {
      __m512 g = E::load(gate + c, there);
      E::store(out + c, there, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(g)), E::load(up + c, there)));
    });
  });
}

// ``again`` is the result of the forward pass, or null.
template <class E>
void swiglu_gradient(const void* das, const void* gates, const void* ups, void* dgates, void* dups, void* again, long rows,
                     long width, long da_stride, long gate_stride, long up_stride, long threads) {
  using T = typename E::T;
  each(rows, width, threads, [=](long row) {
    const T *da = (const T*)das + row * da_stride, *gate = (const T*)gates + row * gate_stride;
    const T* up = (const T*)ups + row * up_stride;
    T *dgate = (T*)dgates + row * width, *dup = (T*)dups + row * width, *out = again ? (T*)again + row * width : nullptr;
    columns(width, [&](long c, __mmask16 there) {
      __m512 g = E::load(gate + c, there), u = E::load(up + c, there), d = E::load(da + c, there), s = sigmoid(g);
      __m512 silu = _mm512_mul_ps(g, s);
      // s (1 + g (1 - s))
      __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(g, _mm512_sub_ps(widen(1.0f), s), widen(1.0f)));
      E::store(dgate + c, there, _mm512_mul_ps(_mm512_mul_ps(d, u), slope));
      E::store(dup + c, there, _mm512_mul_ps(d, silu));
      if (out) E::store(out + c, there, _mm512_mul_ps(silu, u));
    });
  });
}

// Heads of each token: (a, b) -> (a cos - b sin, b cos + a sin) of the first 2 ``half`` channels; the others pass. In
// place, too.
template <class E>
void rotate(const void* xs, void* outs, const float* cosines, const float* sines, long tokens, long heads, long dim,
            long half, float sign, long threads) {
  using T = typename E::T;
  each(tokens, heads * dim, threads, [=](long token) {
    const float *cosine = cosines + token * 2 * half, *sine = sines + token * 2 * half;
    for (long head = 0; head < heads; head++) {
      const T* x = (const T*)xs + (token * heads + head) * dim;
      T* out = (T*)outs + (token * heads + head) * dim;
      columns(half, [&](long c, __mmask16 there) {
        __m512 a = E::load(x + c, there), b = E::load(x + half + c, there);
        __m512 cos = Float32::load(cosine + c, there), sin = _mm512_mul_ps(Float32::load(sine + c, there), widen(sign));
        E::store(out + c, there, _mm512_sub_ps(_mm512_mul_ps(a, cos), _mm512_mul_ps(b, sin)));
        E::store(out + half + c, there, _mm512_add_ps(_mm512_mul_ps(b, cos), _mm512_mul_ps(a, sin)));
      });
      if (out != x) std::memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
    }
  });
}

}  // namespace

extern "C" {

void smp_softmax_stats(int bf16, const void* logits, const int64_t* ids, float* stats, int64_t rows, int64_t valid,
                       int64_t stride, int64_t threads) {
  (bf16 ? softmax_stats<BFloat16> : softmax_stats<Float32>)(logits, ids, stats, rows, valid, stride, threads);
}

void smp_logits_to_gradient(int bf16, void* logits, const int64_t* ids, const float* stats, const float* weights,
                            int64_t rows, int64_t width, int64_t valid, int64_t stride, int64_t threads) {
  (bf16 ? logits_to_gradient<BFloat16> : logits_to_gradient<Float32>)(logits, ids, stats, weights, rows, width, valid,
                                                                      stride, threads);
}

void smp_norm(int bf16, const void* x, const void* residual, const float* weight, const float* bias, void* y, void* total,
              float* means, float* scales, int64_t rows, int64_t width, float eps, int64_t threads) {
  (bf16 ? norm<BFloat16> : norm<Float32>)(x, residual, weight, bias, y, total, means, scales, rows, width, eps, threads);
}

// Floats of ``sums`` for the gradient of a weight or a bias.
int64_t smp_norm_sums(int64_t rows, int64_t width) { return parts_of(rows) * width; }

void smp_norm_gradient(int bf16, const void* dy, const void* dtotal, const void* x, const float* weight,
                       const float* means, const float* scales, void* dx, float* dweight, float* dbias, float* sums,
                       int64_t rows, int64_t width, int64_t threads) {
  (bf16 ? norm_gradient<BFloat16> : norm_gradient<Float32>)(dy, dtotal, x, weight, means, scales, dx, dweight, dbias, sums,
                                                            rows, width, threads);
}

void smp_swiglu(int bf16, const void* gate, const void* up, void* out, int64_t rows, int64_t width, int64_t gate_stride,
                int64_t up_stride, int64_t threads) {
  (bf16 ? swiglu<BFloat16> : swiglu<Float32>)(gate, up, out, rows, width, gate_stride, up_stride, threads);
}

void smp_swiglu_gradient(int bf16, const void* da, const void* gate, const void* up, void* dgate, void* dup, void* again,
                         int64_t rows, int64_t width, int64_t da_stride, int64_t gate_stride, int64_t up_stride,
                         int64_t threads) {
  (bf16 ? swiglu_gradient<BFloat16> : swiglu_gradient<Float32>)(da, gate, up, dgate, dup, again, rows, width, da_stride,
                                                                gate_stride, up_stride, threads);
}

void smp_rotate(int bf16, const void* x, void* out, const float* cos, const float* sin, int64_t tokens, int64_t heads,
                int64_t dim, int64_t half, float sign, int64_t threads) {
  (bf16 ? rotate<BFloat16> : rotate<Float32>)(x, out, cos, sin, tokens, heads, dim, half, sign, threads);
}
}
