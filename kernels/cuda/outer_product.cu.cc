// The programs of block.h on a GPU: the instructions they need, and how they are launched.

#include "outer_product.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "block.h"
#include "dispatch.h"

namespace poseidon {
namespace {

static_assert(kSuccess == cudaSuccess && kInvalidValue == cudaErrorInvalidValue,
              "dispatch.h, which does not include CUDA, has the same numbers");

extern __shared__ __align__(16) char shared_memory[];

struct Gpu {
  // Volatile, so that what is made of it is not kept in registers while others need them.
  static __device__ unsigned thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  static __device__ int64_t first_tile() { return blockIdx.x; }
  static __device__ int64_t tile_step() { return gridDim.x; }
  static __device__ void Barrier() { __syncthreads(); }

  template <typename V>
  static __device__ V LoadShared(int at) {
    return *reinterpret_cast<const V*>(shared_memory + at);
  }

  // Copies to shared memory, or writes zeros there. What the hardware can, it does in the
  // background.
  template <int kBytes>
  static __device__ void Copy(int at, const char* from, bool is_inside) {
    if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(shared_memory + at) = is_inside ? *reinterpret_cast<const uint16_t*>(from) : 0;
    } else {
      const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory + at));
      const int bytes = is_inside ? kBytes : 0;
      if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                     : "memory");
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
      }
    }
  }
  static __device__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int kPending>
  static __device__ void WaitForCopies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

  // The result is read and written once: what it displaces from the caches is worth more.
  static __device__ float Read(const float* from) { return __ldcs(from); }
  template <typename T>  // Bfloat16 or Float16
  static __device__ T Read(const T* from) {
    return {__ldcs(&from->bits)};
  }
  template <typename T>
  static __device__ Vector<T, 16> Read(const Vector<T, 16>* from) {
    union {
      uint4 words;
      Vector<T, 16> vector;
    } value = {__ldcs(reinterpret_cast<const uint4*>(from))};
    return value.vector;
  }
  static __device__ void Write(float* to, float value) { __stcs(to, value); }
  template <typename T>
  static __device__ void Write(T* to, T value) {
    __stcs(&to->bits, value.bits);
  }
  template <typename T>
  static __device__ void Write(Vector<T, 16>* to, const Vector<T, 16>& value) {
    __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&value));
  }

  static __device__ float ToFloat(float value) { return value; }
  static __device__ float ToFloat(Bfloat16 value) { return __bfloat162float(__ushort_as_bfloat16(value.bits)); }
  static __device__ float ToFloat(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }
  static __device__ void Round(float value, float& to) { to = value; }
  static __device__ void Round(float value, Bfloat16& to) {
    to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
  static __device__ void Round(float value, Float16& to) { to.bits = __half_as_ushort(__float2half_rn(value)); }
  // The halves of two words, those of x below those of y.
  static __device__ uint32_t LowerHalves(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); }
  static __device__ uint32_t UpperHalves(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }

  // Adds the products of all of a warp's rows and columns.
  template <typename T>
  static __device__ void MultiplyAdd(const Fragments& u, const Fragments& v, Sums& sums) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        MultiplyAdd(T{}, u[2 * m], u[2 * m + 1], v[n], sums[m][n]);
      }
    }
  }

 private:
#define POSEIDON_MMA(T, shape_and_types)                                                                       \
  static __device__ void MultiplyAdd(T, const uint32_t (&upper)[2], const uint32_t (&lower)[2],                \
                                     const uint32_t (&v)[2], float (&sums)[4]) {                               \
    asm("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
        : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(v[0]), "r"(v[1]));                   \
  }
  POSEIDON_MMA(Bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
  POSEIDON_MMA(Float16, "m16n8k16.row.col.f32.f16.f16.f32")
  POSEIDON_MMA(Tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef POSEIDON_MMA
};

template <typename ThisProgram>
__global__ void __launch_bounds__(kThreads, 1)
    RunBlock(const __grid_constant__ typename ThisProgram::Arguments arguments) {
  Gpu gpu;
  ThisProgram::Run(gpu, arguments);
}

struct Launcher {
  cudaStream_t stream;

  // One block for each multiprocessor, which goes through tiles until there are none left. What is
  // asked and set here depends on the current device and costs less than to remember it.
  template <typename ThisProgram>
  int Run(typename ThisProgram::Arguments arguments) const {
    const auto kernel = reinterpret_cast<const void*>(&RunBlock<ThisProgram>);
    int device, multiprocessors;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ThisProgram::kSharedBytes);
    if (error != cudaSuccess) return error;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(arguments.end_tile, multiprocessors));
    void* pointers[] = {&arguments};
    return cudaLaunchKernel(kernel, blocks, kThreads, pointers, ThisProgram::kSharedBytes, stream);
  }
};

}  // namespace
}  // namespace poseidon

int poseidon_outer_product(CUstream_st* stream, const PoseidonFactors* factors, float alpha, float beta, void* out,
                           PoseidonType out_type) {
  poseidon::Launcher launcher{stream};
  return poseidon::OuterProduct(launcher, factors, alpha, beta, out, out_type);
}

int poseidon_outer_product_update(CUstream_st* stream, const PoseidonFactors* factors, float learning_rate,
                                  float momentum, bool nesterov, float* velocity, float* weights) {
  poseidon::Launcher launcher{stream};
  return poseidon::Update(launcher, factors, learning_rate, momentum, nesterov, velocity, weights);
}

const char* poseidon_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
