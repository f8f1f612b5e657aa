// Cross-entropy over one rank's columns of the logits, in CUDA C++; the mathematics is in ../cross_entropy.py.
//
// Layout: logits (rows, stride) row by row, the first `valid` columns are real, those up to `width` are padding.
// Forward: a block of threads per row reads it once, 16 bytes a load, each thread with a running maximum and a sum that is
// rescaled when the maximum grows (one exponential per logit and one per load); the threads' pairs are merged at the end.
// Backward: a block of threads per 2,048 columns of a row reads them and writes the gradient in their place.
//
// No header of torch: plain C functions that take pointers and a stream and return cudaGetLastError(). One build serves
// every torch. bf16 and fp32 logits; all sums are fp32.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace {

constexpr int kForwardThreads = 512;
constexpr int kBackwardThreads = 256;
constexpr float kLowest = -3.4e38f;  // finite: a row of minus infinities must not make inf - inf

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store(float* place, float x) { *place = x; }
__device__ __forceinline__ void store(__nv_bfloat16* place, float x) { *place = __float2bfloat16_rn(x); }

// 16 bytes of logits.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// max and sum exp(. - max) of what was seen so far.
struct Running {
  float peak = kLowest;
  float sum = 0.0f;

  __device__ void merge(float other_peak, float other_sum) {
    const float higher = fmaxf(peak, other_peak);
    sum = sum * __expf(peak - higher) + other_sum * __expf(other_peak - higher);
    peak = higher;
  }
};

template <typename T, int N>
__device__ void take(Running& running, const T (&values)[N]) {
  float z[N], higher = running.peak;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = to_float(values[i]);
    higher = fmaxf(higher, z[i]);
  }
  float sum = running.sum * __expf(running.peak - higher);
#pragma unroll
  for (int i = 0; i < N; ++i) sum += __expf(z[i] - higher);
  // fmaxf ignores NaN, the sum does not: a NaN logit makes the loss NaN, as it must.
  running.peak = higher;
  running.sum = sum;
}

__device__ Running merge_block(Running running) {
  __shared__ float peaks[kForwardThreads / 32], sums[kForwardThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    const float peak = __shfl_xor_sync(0xffffffffu, running.peak, offset);
    const float sum = __shfl_xor_sync(0xffffffffu, running.sum, offset);
    running.merge(peak, sum);
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    peaks[warp] = running.peak;
    sums[warp] = running.sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kForwardThreads / 32; ++i) running.merge(peaks[i], sums[i]);
  }
  return running;  // of the whole row, in thread 0
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kForwardThreads)
    stats_kernel(const T* __restrict__ logits, const int64_t* __restrict__ columns, float* __restrict__ stats,
                 int64_t stride, int64_t valid) {
  const int64_t row = blockIdx.x;
  const T* z = logits + row * stride;
  Running running;
  int64_t rest = 0;
  if constexpr (kAligned) {
    constexpr int kSize = Pack<T>::kSize;
    const auto* packs = reinterpret_cast<const Pack<T>*>(z);
    const int64_t count = valid / kSize;
    for (int64_t i = threadIdx.x; i < count; i += kForwardThreads) {
      const Pack<T> pack = packs[i];
      take(running, pack.values);
    }
    rest = count * kSize;
  }
  for (int64_t i = rest + threadIdx.x; i < valid; i += kForwardThreads) {
    const T one[1] = {z[i]};
    take(running, one);
  }
  running = merge_block(running);
  if (threadIdx.x == 0) {
    const int64_t target = columns[row];
    const int64_t rows = gridDim.x;
    stats[row] = running.peak;
    stats[rows + row] = __logf(running.sum);
    stats[2 * rows + row] = target >= 0 && target < valid ? to_float(z[target]) : 0.0f;
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kBackwardThreads)
    gradient_kernel(T* __restrict__ logits, const float* __restrict__ stats, const int64_t* __restrict__ columns,
                    const float* __restrict__ weights, int64_t stride, int64_t width, int64_t valid) {
  constexpr int kSize = kAligned ? Pack<T>::kSize : 1;
  const int64_t row = blockIdx.x;
  const int64_t first = (int64_t(blockIdx.y) * kBackwardThreads + threadIdx.x) * kSize;
  if (first >= width) return;
  const float peak = stats[row], log_sum = stats[int64_t(gridDim.x) + row], weight = weights[row];
  const int64_t target = columns[row];
  T* z = logits + row * stride + first;
  const auto gradient = [&](int64_t column, float logit) {
    if (column >= valid) return 0.0f;
    return __expf((logit - peak) - log_sum) * weight - (column == target ? weight : 0.0f);
  };
  if (kAligned && first + kSize <= width) {
    if constexpr (kAligned) {
      auto* place = reinterpret_cast<Pack<T>*>(z);
      Pack<T> pack = *place;
#pragma unroll
      for (int i = 0; i < kSize; ++i) store(&pack.values[i], gradient(first + i, to_float(pack.values[i])));
      *place = pack;
    }
    return;
  }
  for (int i = 0; i < kSize && first + i < width; ++i) store(&z[i], gradient(first + i, to_float(z[i])));
}

template <typename T>
bool aligned(const void* logits, int64_t stride) {
  return reinterpret_cast<uintptr_t>(logits) % 16 == 0 && stride % Pack<T>::kSize == 0;
}

template <typename T>
void launch_stats(const void* logits, const int64_t* columns, float* stats, int64_t rows, int64_t stride, int64_t valid,
                  cudaStream_t stream) {
  const auto kernel = aligned<T>(logits, stride) ? stats_kernel<T, true> : stats_kernel<T, false>;
  kernel<<<dim3(unsigned(rows)), kForwardThreads, 0, stream>>>(static_cast<const T*>(logits), columns, stats, stride,
                                                              valid);
}

template <typename T>
void launch_gradient(void* logits, const float* stats, const int64_t* columns, const float* weights, int64_t rows,
                     int64_t stride, int64_t width, int64_t valid, cudaStream_t stream) {
  const bool wide = aligned<T>(logits, stride);
  const int64_t per_block = int64_t(kBackwardThreads) * (wide ? Pack<T>::kSize : 1);
  const auto kernel = wide ? gradient_kernel<T, true> : gradient_kernel<T, false>;
  const dim3 grid(unsigned(rows), unsigned((width + per_block - 1) / per_block));
  kernel<<<grid, kBackwardThreads, 0, stream>>>(static_cast<T*>(logits), stats, columns, weights, stride, width,
                                               valid);
}

}  // namespace

extern "C" {

// Returns a cudaError_t; 0 is success. `bf16` is 1 for bfloat16 logits, 0 for float.
// `stats` are three rows: largest logits, logarithms of the sums beside them, logits of the targets.
int smp_cross_entropy_stats(const void* logits, const int64_t* columns, float* stats, int64_t rows, int64_t stride,
                            int64_t valid, int bf16, void* stream) {
  if (rows == 0) return 0;
  const auto launch = bf16 ? launch_stats<__nv_bfloat16> : launch_stats<float>;
  launch(logits, columns, stats, rows, stride, valid, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int smp_cross_entropy_gradient(void* logits, const float* stats, const int64_t* columns, const float* weights,
                               int64_t rows, int64_t stride, int64_t width, int64_t valid, int bf16, void* stream) {
  if (rows == 0 || width == 0) return 0;
  const auto launch = bf16 ? launch_gradient<__nv_bfloat16> : launch_gradient<float>;
  launch(logits, stats, columns, weights, rows, stride, width, valid, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

// Whether the current device can run this library: an error where it holds no code for it, or where there is none.
int smp_usable() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, stats_kernel<float, true>);
}

const char* smp_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
