// Attention on a CPU with AVX-512, forward and backward (FlashAttention, Dao 2023, arXiv 2307.08691): see
// smp/kernels/cpp/attention.py for what is computed, and docs/kernels.md for what it gains.
//
// One head is a few products of small matrices: S = Q K^T, O = P V, and backward dP = dO V^T, dV = P^T dO, dQ = dS K,
// dK = dS^T Q. All run through one kernel, C += A B, that keeps 6 x 64 sums in registers. A is read by numbers of 32
// bits, which are broadcast; rows of B lie one after the other. In bf16 such a number is a pair of neighbours along the
// dimension that is summed (vdpbf16ps multiplies pairs and adds in fp32), so B has its rows in pairs. Blocks of scores
// stay in the cache: nothing of length x length is written. Rows and columns of all blocks are filled up with zeros.
//
// Everything is summed in an order that depends on the sizes alone: the same bits with any number of threads.

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace {

constexpr long ROWS = 64;    // queries of a block
constexpr long COLUMNS = 128;  // keys of a block
constexpr float NEVER = -INFINITY;

// C (R x 16 V) = or += A B, with A's numbers at [row * a_row + k * a_k], B's rows of b_row.
template <class E, int R, int V>
void tile(const uint32_t* a, long a_row, long a_k, const uint32_t* b, long b_row, float* c, long c_row, long k, bool add) {
  __m512 sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = add ? _mm512_loadu_ps(c + r * c_row + 16 * v) : _mm512_setzero_ps();
  for (long p = 0; p < k; p++) {
    __m512i row[V];
    for (int v = 0; v < V; v++) row[v] = _mm512_loadu_si512(b + p * b_row + 16 * v);
    for (int r = 0; r < R; r++) {
      __m512i left = _mm512_set1_epi32((int)a[r * a_row + p * a_k]);
      for (int v = 0; v < V; v++) sums[r][v] = E::fma(sums[r][v], left, row[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) _mm512_storeu_ps(c + r * c_row + 16 * v, sums[r][v]);
}

template <class E, int V>
void columns(const uint32_t* a, long a_row, long a_k, const uint32_t* b, long b_row, float* c, long c_row, long m, long k,
             bool add) {
  long r = 0;
  for (; r + 6 <= m; r += 6) tile<E, 6, V>(a + r * a_row, a_row, a_k, b, b_row, c + r * c_row, c_row, k, add);
  const uint32_t* left = a + r * a_row;
  float* to = c + r * c_row;
  switch (m - r) {
    case 5: tile<E, 5, V>(left, a_row, a_k, b, b_row, to, c_row, k, add); break;
    case 4: tile<E, 4, V>(left, a_row, a_k, b, b_row, to, c_row, k, add); break;
    case 3: tile<E, 3, V>(left, a_row, a_k, b, b_row, to, c_row, k, add); break;
    case 2: tile<E, 2, V>(left, a_row, a_k, b, b_row, to, c_row, k, add); break;
    case 1: tile<E, 1, V>(left, a_row, a_k, b, b_row, to, c_row, k, add); break;
  }
}

// C (m x n) = or += A (m x k) B (k x n): n is a multiple of 16, k counts numbers of 32 bits.
template <class E>
void product(const uint32_t* a, long a_row, long a_k, const uint32_t* b, long b_row, float* c, long c_row, long m, long n,
             long k, bool add) {
  long j = 0;
  for (; j + 64 <= n; j += 64) columns<E, 4>(a, a_row, a_k, b + j, b_row, c + j, c_row, m, k, add);
  switch ((n - j) / 16) {
    case 3: columns<E, 3>(a, a_row, a_k, b + j, b_row, c + j, c_row, m, k, add); break;
    case 2: columns<E, 2>(a, a_row, a_k, b + j, b_row, c + j, c_row, m, k, add); break;
    case 1: columns<E, 1>(a, a_row, a_k, b + j, b_row, c + j, c_row, m, k, add); break;
  }
}

// Rows of a head as A reads them: (rows, width) of T, filled up with zeros.
template <class E>
void pack_rows(typename E::T* to, long width, const typename E::T* x, long stride, long rows, long filled, long dim) {
  for (long r = 0; r < filled; r++) {
    std::memset(to + r * width, 0, width * sizeof(*to));
    if (r < rows) std::memcpy(to + r * width, x + r * stride, dim * sizeof(*to));
  }
}

// Rows of a head as B reads them where rows are summed over: (rows / PAIR, width) of 32 bits.
template <class E>
void pack_pairs(uint32_t* to, long width, const typename E::T* x, long stride, long rows, long filled, long dim) {
  auto* out = reinterpret_cast<typename E::T*>(to);
  for (long r = 0; r < filled; r++)
    for (long d = 0; d < width; d++)
      out[(r / E::PAIR * width + d) * E::PAIR + r % E::PAIR] = r < rows && d < dim ? x[r * stride + d] : typename E::T(0);
}

// Rows of a head as B reads them where channels are summed over: (width / PAIR, filled) of 32 bits.
template <class E>
void pack_turned(uint32_t* to, const typename E::T* x, long stride, long rows, long filled, long dim, long width) {
  auto* out = reinterpret_cast<typename E::T*>(to);
  for (long d = 0; d < width; d++)
    for (long r = 0; r < filled; r++)
      out[(d / E::PAIR * filled + r) * E::PAIR + d % E::PAIR] = r < rows && d < dim ? x[r * stride + d] : typename E::T(0);
}

}  // namespace

// Sizes and strides, in elements; smp/kernels/cpp/attention.py has the same structure. Tensors are (batch, heads,
// length, dim) with neighbouring channels, lse is (batch, heads, length) in one piece, a mask is added to the scores.
struct Call {
  int64_t batch, heads, groups, length, keys, dim, causal, threads;
  int64_t q[3], k[3], v[3], out[3], dout[3], dq[3], dk[3], dv[3], mask[2];  // strides; of a mask: of the batch, of a row
  float scale;
};

namespace {

// Memory of one thread: its part of what lies behind ``all``.
struct Scratch {
  char* memory;
  long used = 0;
  Scratch(void* all, long before, long bytes)
      : memory(static_cast<char*>(all) + up(before, 64) + omp_get_thread_num() * up(bytes, 64)) {}
  template <class T>
  T* take(long n) {
    T* at = reinterpret_cast<T*>(memory + used);
    used += up(n * long(sizeof(T)), 64);
    return at;
  }
};

// Keys and values of all heads, packed once for all blocks of queries.
template <class E>
struct Packed {
  long width, filled, size;  // channels and keys, filled up; numbers of 32 bits of a head
  uint32_t *k_turned, *v_turned, *k_pairs, *v_pairs;

  Packed(const Call& call, uint32_t* memory) {
    width = up(call.dim, 16), filled = up(call.keys, COLUMNS), size = filled * width / E::PAIR;
    long all = call.batch * call.groups * size;
    k_turned = memory, v_pairs = memory + all, v_turned = memory + 2 * all, k_pairs = memory + 3 * all;
  }

  void fill(const Call& call, const typename E::T* k, const typename E::T* v, bool backward) {
    long blocks = filled / COLUMNS, step = COLUMNS * width / E::PAIR;
#pragma omp for
    for (long task = 0; task < call.batch * call.groups * blocks; task++) {
      long head = task / blocks, j = task % blocks * COLUMNS, rows = std::min(call.keys - j, COLUMNS);
      long b = head / call.groups, g = head % call.groups, to = head * size + task % blocks * step;
      const auto* kb = k + b * call.k[0] + g * call.k[1] + j * call.k[2];
      const auto* vb = v + b * call.v[0] + g * call.v[1] + j * call.v[2];
      pack_turned<E>(k_turned + to, kb, call.k[2], rows, COLUMNS, call.dim, width);
      if (backward) {
        pack_turned<E>(v_turned + to, vb, call.v[2], rows, COLUMNS, call.dim, width);
        pack_pairs<E>(k_pairs + to, width, kb, call.k[2], rows, COLUMNS, call.dim);
      } else {
        pack_pairs<E>(v_pairs + to, width, vb, call.v[2], rows, COLUMNS, call.dim);
      }
    }
  }
};

// Scores of row i and 16 keys from j on, scaled and masked: -inf where a key is not seen.
template <class E>
__m512 scores_of(const Call& call, const float* s, const typename E::T* mask_row, long i, long j) {
  __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s), _mm512_set1_ps(call.scale));
  __mmask16 there = first(std::min(call.causal ? i + 1 : call.keys, call.keys) - j);
  if (mask_row) x = _mm512_add_ps(x, E::load(mask_row + j, there));
  return _mm512_mask_mov_ps(_mm512_set1_ps(NEVER), there, x);
}

// Keys that rows below i + rows see: the end of their blocks.
long last_key(const Call& call, long i, long rows) { return call.causal ? std::min(call.keys, i + rows) : call.keys; }

template <class E>
void forward_block(const Call& call, const Packed<E>& packed, const typename E::T* q, const typename E::T* mask,
                   typename E::T* out, float* lse, long b, long h, long i, Scratch& scratch) {
  using T = typename E::T;
  scratch.used = 0;
  long width = packed.width, rows = std::min(ROWS, call.length - i), head = b * call.groups + h / (call.heads / call.groups);
  T* left = scratch.take<T>(ROWS * width);
  T* p = scratch.take<T>(ROWS * COLUMNS);
  float* s = scratch.take<float>(ROWS * COLUMNS);
  float* o = scratch.take<float>(ROWS * width);
  float peak[ROWS], sum[ROWS];
  for (long r = 0; r < rows; r++) peak[r] = NEVER, sum[r] = 0;
  std::memset(o, 0, ROWS * width * sizeof(float));
  pack_rows<E>(left, width, q + b * call.q[0] + h * call.q[1] + i * call.q[2], call.q[2], rows, rows, call.dim);
  long end = last_key(call, i, rows);
  for (long j = 0; j < end; j += COLUMNS) {
    long step = packed.size * head + j * width / E::PAIR, n = std::min(COLUMNS, up(end - j, 16));
    product<E>((uint32_t*)left, width / E::PAIR, 1, packed.k_turned + step, COLUMNS, s, COLUMNS, rows, n, width / E::PAIR,
               false);
    for (long r = 0; r < rows; r++) {
      const T* mask_row = mask ? mask + b * call.mask[0] + (i + r) * call.mask[1] : nullptr;
      __m512 most = _mm512_set1_ps(NEVER);
      for (long c = 0; c < n; c += 16) {
        __m512 x = scores_of<E>(call, s + r * COLUMNS + c, mask_row, i + r, j + c);
        _mm512_storeu_ps(s + r * COLUMNS + c, x);
        most = _mm512_max_ps(most, x);
      }
      float old = peak[r], top = std::max(old, _mm512_reduce_max_ps(most));
      // Of a row that has seen nothing yet the peak is -inf: -inf - -inf would not be a number.
      float shift = top == NEVER ? 0.0f : top, kept = old == NEVER ? 0.0f : std::exp(old - shift);
      __m512 total = _mm512_setzero_ps();
      for (long c = 0; c < n; c += 16) {
        __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(s + r * COLUMNS + c), _mm512_set1_ps(shift)));
        total = _mm512_add_ps(total, e);
        E::store(p + r * COLUMNS + c, 0xffff, e);
      }
      peak[r] = top, sum[r] = sum[r] * kept + _mm512_reduce_add_ps(total);
      if (kept != 1.0f)
        for (long d = 0; d < width; d += 16)
          _mm512_storeu_ps(o + r * width + d, _mm512_mul_ps(_mm512_loadu_ps(o + r * width + d), _mm512_set1_ps(kept)));
    }
    product<E>((uint32_t*)p, COLUMNS / E::PAIR, 1, packed.v_pairs + step, width, o, width, rows, width, n / E::PAIR, true);
  }
  T* to = out + b * call.out[0] + h * call.out[1] + i * call.out[2];
  for (long r = 0; r < rows; r++) {
    __m512 share = _mm512_set1_ps(sum[r] == 0.0f ? 0.0f : 1.0f / sum[r]);
    for (long d = 0; d < call.dim; d += 16)
      E::store(to + r * call.out[2] + d, first(call.dim - d), _mm512_mul_ps(_mm512_loadu_ps(o + r * width + d), share));
    lse[(b * call.heads + h) * call.length + i + r] = sum[r] == 0.0f ? NEVER : peak[r] + std::log(sum[r]);
  }
}

// Of keys and values of all heads, packed.
template <class E>
long packed_bytes(const Call& call) {
  return 4 * call.batch * call.groups * up(call.keys, COLUMNS) * up(call.dim, 16) * long(sizeof(typename E::T));
}

// Of a block of the forward pass, for each thread.
long block_bytes(const Call& call) { return ROWS * (up(call.dim, 16) + COLUMNS) * 2 * long(sizeof(float)) + 512; }

template <class E>
void forward(const Call& call, const void* q, const void* k, const void* v, const void* mask, void* out, float* lse,
             void* memory) {
  using T = typename E::T;
  Packed<E> packed(call, static_cast<uint32_t*>(memory));
  long blocks = (call.length + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(call.threads)
  {
    packed.fill(call, (const T*)k, (const T*)v, false);
    Scratch scratch(memory, packed_bytes<E>(call), block_bytes(call));
#pragma omp for schedule(dynamic)
    for (long task = 0; task < call.batch * call.heads * blocks; task++) {
      // The last blocks first: with a causal mask they take longest.
      long i = (blocks - 1 - task % blocks) * ROWS, head = task / blocks;
      forward_block<E>(call, packed, (const T*)q, (const T*)mask, (T*)out, lse, head / call.heads, head % call.heads, i,
                       scratch);
    }
  }
}

// One head's part of the backward pass.
template <class E>
struct Head {
  using T = typename E::T;
  const Call& call;
  const Packed<E>& packed;
  long width, filled;                // channels and queries, filled up
  T *q_rows, *g_rows;                // queries and gradients of the output, for S and dP
  uint32_t *q_pairs, *g_pairs;       // for dK and dV
  float *delta, *dq, *s, *dp;        // rowsum(dout * out), a sum over all keys, and a block of each
  uint32_t *p_turned, *ds_turned;    // (rows / PAIR, keys): pairs of rows
  T* ds_rows;                        // (rows, keys)
  float *dk, *dv;                    // of a block of keys

  static long bytes(const Call& call) {
    long width = up(call.dim, 16), filled = up(call.length, ROWS);
    return filled * width * (4 * sizeof(T) + sizeof(float)) + filled * sizeof(float) +
           (5 * ROWS + 2 * width) * COLUMNS * long(sizeof(float)) + 1024;
  }

  Head(const Call& call, const Packed<E>& packed, Scratch& scratch)
      : call(call), packed(packed), width(packed.width), filled(up(call.length, ROWS)) {
    scratch.used = 0;
    q_rows = scratch.take<T>(filled * width), g_rows = scratch.take<T>(filled * width);
    q_pairs = scratch.take<uint32_t>(filled * width / E::PAIR), g_pairs = scratch.take<uint32_t>(filled * width / E::PAIR);
    delta = scratch.take<float>(filled), dq = scratch.take<float>(filled * width);
    s = scratch.take<float>(ROWS * COLUMNS), dp = scratch.take<float>(ROWS * COLUMNS);
    p_turned = scratch.take<uint32_t>(ROWS * COLUMNS / E::PAIR), ds_turned = scratch.take<uint32_t>(ROWS * COLUMNS / E::PAIR);
    ds_rows = scratch.take<T>(ROWS * COLUMNS);
    dk = scratch.take<float>(COLUMNS * width), dv = scratch.take<float>(COLUMNS * width);
  }

  void begin(const T* q, const T* dout, const T* out) {
    pack_rows<E>(q_rows, width, q, call.q[2], call.length, filled, call.dim);
    pack_rows<E>(g_rows, width, dout, call.dout[2], call.length, filled, call.dim);
    pack_pairs<E>(q_pairs, width, q, call.q[2], call.length, filled, call.dim);
    pack_pairs<E>(g_pairs, width, dout, call.dout[2], call.length, filled, call.dim);
    std::memset(dq, 0, filled * width * sizeof(float));
    for (long i = 0; i < call.length; i++) {
      __m512 total = _mm512_setzero_ps();
      for (long d = 0; d < call.dim; d += 16) {
        __mmask16 there = first(call.dim - d);
        total = _mm512_fmadd_ps(E::load(dout + i * call.dout[2] + d, there), E::load(out + i * call.out[2] + d, there), total);
      }
      delta[i] = _mm512_reduce_add_ps(total);
    }
  }

  // 16 columns of two rows (one in fp32) of p and ds, as A reads them.
  void keep(const __m512* p, const __m512* ds, long r, long c) {
    if constexpr (E::PAIR == 1) {
      _mm512_storeu_ps((float*)p_turned + r * COLUMNS + c, p[0]);
      _mm512_storeu_ps((float*)ds_turned + r * COLUMNS + c, ds[0]);
    } else {
      for (int which = 0; which < 2; which++) {
        const __m512* x = which ? ds : p;
        __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x[0]));
        __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x[1]));
        _mm512_storeu_si512((which ? ds_turned : p_turned) + r / 2 * COLUMNS + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
      for (int o = 0; o < 2; o++) E::store(ds_rows + (r + o) * COLUMNS + c, 0xffff, ds[o]);
    }
  }

  // Queries from i on and n keys from j on: adds to dq, dk and dv.
  void block(const T* mask, const float* lse, long head, long i, long j, long n) {
    long rows = std::min(ROWS, call.length - i), even = up(rows, E::PAIR), step = packed.size * head + j * width / E::PAIR;
    long channels = width / E::PAIR;
    product<E>((uint32_t*)(q_rows + i * width), channels, 1, packed.k_turned + step, COLUMNS, s, COLUMNS, rows, n, channels, false);
    product<E>((uint32_t*)(g_rows + i * width), channels, 1, packed.v_turned + step, COLUMNS, dp, COLUMNS, rows, n, channels, false);
    for (long r = 0; r < even; r += E::PAIR)
      for (long c = 0; c < n; c += 16) {
        __m512 p[2], ds[2];
        for (long o = 0; o < E::PAIR; o++) {
          long row = i + r + o;
          p[o] = ds[o] = _mm512_setzero_ps();
          if (r + o >= rows) continue;
          __m512 x = scores_of<E>(call, s + (r + o) * COLUMNS + c, mask ? mask + row * call.mask[1] : nullptr, row, j + c);
          float shift = lse[row] == NEVER ? 0.0f : lse[row];  // of a row that sees nothing
          p[o] = exponential(_mm512_sub_ps(x, _mm512_set1_ps(shift)));
          __m512 change = _mm512_sub_ps(_mm512_loadu_ps(dp + (r + o) * COLUMNS + c), _mm512_set1_ps(delta[row]));
          ds[o] = _mm512_mul_ps(_mm512_mul_ps(p[o], change), _mm512_set1_ps(call.scale));
        }
        keep(p, ds, r, c);
      }
    const uint32_t* left = E::PAIR == 1 ? ds_turned : (uint32_t*)ds_rows;
    product<E>(left, COLUMNS / E::PAIR, 1, packed.k_pairs + step, width, dq + i * width, width, rows, width, n / E::PAIR, true);
    long pairs = i / E::PAIR * width;
    product<E>(p_turned, 1, COLUMNS, g_pairs + pairs, width, dv, width, n, width, even / E::PAIR, true);
    product<E>(ds_turned, 1, COLUMNS, q_pairs + pairs, width, dk, width, n, width, even / E::PAIR, true);
  }
};

template <class E>
void backward_head(const Call& call, const Packed<E>& packed, const void* q, const void* dout, const void* out,
                   const void* mask, const float* lse, void* dq, float* sums, long b, long h, Scratch& scratch) {
  using T = typename E::T;
  Head<E> head(call, packed, scratch);
  long width = packed.width, group = b * call.groups + h / (call.heads / call.groups);
  head.begin((const T*)q + b * call.q[0] + h * call.q[1], (const T*)dout + b * call.dout[0] + h * call.dout[1],
             (const T*)out + b * call.out[0] + h * call.out[1]);
  const T* mask_of = mask ? (const T*)mask + b * call.mask[0] : nullptr;
  const float* lse_of = lse + (b * call.heads + h) * call.length;
  float* dk = sums + (b * call.heads + h) * call.keys * width;
  float* dv = dk + call.batch * call.heads * call.keys * width;
  for (long j = 0; j < call.keys; j += COLUMNS) {
    std::memset(head.dk, 0, COLUMNS * width * sizeof(float));
    std::memset(head.dv, 0, COLUMNS * width * sizeof(float));
    for (long i = call.causal ? j / ROWS * ROWS : 0; i < call.length; i += ROWS) {
      long seen = last_key(call, i, ROWS) - j;
      head.block(mask_of, lse_of, group, i, j, std::min(COLUMNS, up(seen, 16)));
    }
    long rows = std::min(COLUMNS, call.keys - j);
    std::memcpy(dk + j * width, head.dk, rows * width * sizeof(float));
    std::memcpy(dv + j * width, head.dv, rows * width * sizeof(float));
  }
  T* to = (T*)dq + b * call.dq[0] + h * call.dq[1];
  for (long i = 0; i < call.length; i++)
    for (long d = 0; d < call.dim; d += 16)
      E::store(to + i * call.dq[2] + d, first(call.dim - d), _mm512_loadu_ps(head.dq + i * width + d));
}

// Gradients of a key/value head: the sum over its query heads, in their order.
template <class E>
void add_heads(const Call& call, const float* sums, void* to, const int64_t* strides, long b, long g, long width) {
  using T = typename E::T;
  long repeats = call.heads / call.groups, size = call.keys * width;
  const float* from = sums + (b * call.heads + g * repeats) * size;
  T* out = (T*)to + b * strides[0] + g * strides[1];
  for (long j = 0; j < call.keys; j++)
    for (long d = 0; d < call.dim; d += 16) {
      __m512 total = _mm512_loadu_ps(from + j * width + d);
      for (long r = 1; r < repeats; r++) total = _mm512_add_ps(total, _mm512_loadu_ps(from + r * size + j * width + d));
      E::store(out + j * strides[2] + d, first(call.dim - d), total);
    }
}

template <class E>
void backward(const Call& call, const void* dout, const void* q, const void* k, const void* v, const void* out,
              const float* lse, const void* mask, void* dq, void* dk, void* dv, void* memory, float* sums) {
  using T = typename E::T;
  Packed<E> packed(call, static_cast<uint32_t*>(memory));
#pragma omp parallel num_threads(call.threads)
  {
    packed.fill(call, (const T*)k, (const T*)v, true);
    Scratch scratch(memory, packed_bytes<E>(call), Head<E>::bytes(call));
#pragma omp for schedule(dynamic)
    for (long task = 0; task < call.batch * call.heads; task++)
      backward_head<E>(call, packed, q, dout, out, mask, lse, dq, sums, task / call.heads, task % call.heads, scratch);
#pragma omp for
    for (long task = 0; task < call.batch * call.groups; task++) {
      long b = task / call.groups, g = task % call.groups;
      add_heads<E>(call, sums, dk, call.dk, b, g, packed.width);
      add_heads<E>(call, sums + call.batch * call.heads * call.keys * packed.width, dv, call.dv, b, g, packed.width);
    }
  }
}

}  // namespace

extern "C" {

// Bytes of ``memory`` and of ``sums`` that a call needs.
int64_t smp_attention_memory(const Call* call, int bf16, int backward) {
  int64_t packed = bf16 ? packed_bytes<BFloat16>(*call) : packed_bytes<Float32>(*call);
  int64_t head = bf16 ? Head<BFloat16>::bytes(*call) : Head<Float32>::bytes(*call);
  return up(packed, 64) + call->threads * up(backward ? head : block_bytes(*call), 64);
}

int64_t smp_attention_sums(const Call* call) {
  return 2 * call->batch * call->heads * call->keys * up(call->dim, 16) * sizeof(float);
}

void smp_attention_forward(const Call* call, int bf16, const void* q, const void* k, const void* v, const void* mask,
                           void* out, float* lse, void* memory) {
  (bf16 ? forward<BFloat16> : forward<Float32>)(*call, q, k, v, mask, out, lse, memory);
}

void smp_attention_backward(const Call* call, int bf16, const void* dout, const void* q, const void* k, const void* v,
                            const void* out, const float* lse, const void* mask, void* dq, void* dk, void* dv,
                            void* memory, float* sums) {
  (bf16 ? backward<BFloat16> : backward<Float32>)(*call, dout, q, k, v, out, lse, mask, dq, dk, dv, memory, sums);
}
}
