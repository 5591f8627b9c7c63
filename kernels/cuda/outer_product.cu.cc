// The programs of block.h on a GPU: the instructions they need, and how they are launched.
//
// Tests: tests/gpu/test_cuda_kernels.py.

#include "outer_product.h"

#include <cuda.h>
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

extern __shared__ __align__(1024) char shared_memory[];  // as SwizzledPanel needs it

struct Gpu {
  // Maps of U and V for the copy engine; null in programs that do not use it.
  const CUtensorMap* u;
  const CUtensorMap* v;

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
      const uint32_t to = Address(at);
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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // Returns the value of the lane whose number differs in the bits of `mask`.
  static __device__ float Exchange(float value, int mask) { return __shfl_xor_sync(0xffffffff, value, mask); }

  // For the copy engine, which adds the bytes that have come at a barrier in shared memory. The phase of
  // the barrier changes when all that are expected are there.
  static __device__ void BeginBoxes(int barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  static __device__ void ExpectBoxes(int barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(Address(barrier)), "r"(bytes)
                 : "memory");
  }
  // Of a factor, of which this machine knows all from its map.
  __device__ void CopyBox(const Factor&, int number, int64_t, int row, int column, int at, int barrier) const {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            Address(at)),
        "l"(number == 0 ? u : v), "r"(column), "r"(row), "r"(Address(barrier))
        : "memory");
  }
  static __device__ void WaitForBoxes(int barrier, unsigned phase) {
    uint32_t is_over;
    do {
      asm volatile(
          "{\n"
          ".reg .pred is_over;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, is_over;\n"
          "}"
          : "=r"(is_over)
          : "r"(Address(barrier)), "r"(phase)
          : "memory");
    } while (!is_over);
  }

  // From here to WaitForProducts, the sums are the tensor cores'.
  static __device__ void BeginProducts(Sums& sums) {
    KeepInRegisters(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  static __device__ void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  static __device__ void WaitForProducts(Sums& sums) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    KeepInRegisters(sums);
  }

  // Adds the products of 16 rows: of 64 columns at `u` and 128 at `v`, whose second 64 are `stride` bytes further.
  template <typename T>
  static __device__ void WarpgroupMultiplyAdd(int u, int v, int stride, Sums& sums, int m) {
    WarpgroupMultiplyAdd(T{}, Describe(u, stride), Describe(v, stride), sums[2 * m], sums[2 * m + 1]);
  }
#endif

 private:
  static __device__ uint32_t Address(int at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory + at));
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // The compiler must neither move nor copy sums while the tensor cores have them.
  static __device__ void KeepInRegisters(Sums& sums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        asm volatile("" : "+f"(sums[i][j][0]), "+f"(sums[i][j][1]), "+f"(sums[i][j][2]), "+f"(sums[i][j][3])::"memory");
      }
    }
  }

  // The matrix descriptor of rows that lie one after another in a SwizzledPanel: of its address, the distance of
  // its blocks of 64 columns, and that of groups of 8 rows, in units of 16 bytes; 1 is the swizzle of 128 bytes.
  static __device__ uint64_t Describe(int at, int stride) {
    return uint64_t{(Address(at) & 0x3ffff) >> 4} | uint64_t(stride >> 4) << 16 | uint64_t{8 * 128 >> 4} << 32 |
           uint64_t{1} << 62;
  }

#define POSEIDON_SUMS(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define POSEIDON_BLOCKS(x)                                                                                 \
  POSEIDON_SUMS(x[0]), POSEIDON_SUMS(x[1]), POSEIDON_SUMS(x[2]), POSEIDON_SUMS(x[3]), POSEIDON_SUMS(x[4]), \
      POSEIDON_SUMS(x[5]), POSEIDON_SUMS(x[6]), POSEIDON_SUMS(x[7])
#define POSEIDON_WGMMA(T, type)                                                                                       \
  static __device__ void WarpgroupMultiplyAdd(T, uint64_t u, uint64_t v, float (&left)[8][4], float (&right)[8][4]) { \
    asm volatile(                                                                                                     \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                  \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "      \
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, "   \
        "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "  \
        "%64, %65, 1, 1, 1, 1, 1;"                                                                                    \
        : POSEIDON_BLOCKS(left), POSEIDON_BLOCKS(right)                                                               \
        : "l"(u), "l"(v));                                                                                            \
  }
  POSEIDON_WGMMA(Bfloat16, "bf16")
  POSEIDON_WGMMA(Float16, "f16")
#undef POSEIDON_WGMMA
#undef POSEIDON_BLOCKS
#undef POSEIDON_SUMS
#endif

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
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    RunBlock(const __grid_constant__ typename ThisProgram::Arguments arguments) {
  Gpu gpu{};
  ThisProgram::Run(gpu, arguments);
}

template <typename ThisProgram>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    RunBlockOnHopper(const __grid_constant__ typename ThisProgram::Arguments arguments,
                     const __grid_constant__ CUtensorMap u, const __grid_constant__ CUtensorMap v) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  Gpu gpu{&u, &v};
  ThisProgram::Run(gpu, arguments);
#else
  __trap();
#endif
}

// Writes what the copy engine must know of a factor of 16-bit elements.
cudaError_t MakeMap(const Factor& factor, int64_t k, CUtensorMap* map) {
  void* function;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(factor.columns), static_cast<cuuint64_t>(k)};
  const cuuint64_t row_bytes[] = {sizes[0] * 2};
  const cuuint32_t box[] = {64, SwizzledPanel<Bfloat16>::kDepth}, steps[] = {1, 1};
  // The engine copies bits: the type may as well be this one for all.
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<char*>(factor.data), sizes, row_bytes, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

struct Launcher {
  cudaStream_t stream;

  // Whether the current device has `wgmma`, which no GPU after Hopper has, and this was compiled for it.
  static bool HasWarpgroups() {
#ifdef POSEIDON_HAS_SM_90A
    int device, major;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
#else
    return false;
#endif
  }

  template <typename ThisProgram>
  int Run(typename ThisProgram::Arguments arguments) const {
    if constexpr (ThisProgram::kIsForHopper) {
      const Factors& f = arguments.factors;
      CUtensorMap u, v;
      cudaError_t error = MakeMap(f.u, f.k, &u);
      if (error == cudaSuccess) error = MakeMap(f.v, f.k, &v);
      if (error != cudaSuccess) return error;
      void* pointers[] = {&arguments, &u, &v};
      return Start<ThisProgram>(reinterpret_cast<const void*>(&RunBlockOnHopper<ThisProgram>), f.end_tile, pointers);
    } else {
      void* pointers[] = {&arguments};
      return Start<ThisProgram>(reinterpret_cast<const void*>(&RunBlock<ThisProgram>), arguments.factors.end_tile,
                                pointers);
    }
  }

 private:
  // As many blocks as the multiprocessors hold, which go through tiles until there are none left. What is
  // asked and set here depends on the current device and costs less than to remember it.
  template <typename ThisProgram>
  int Start(const void* kernel, int64_t tiles, void** arguments) const {
    int device, multiprocessors, blocks_of_one;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ThisProgram::kSharedBytes);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_of_one, kernel, kThreads, ThisProgram::kSharedBytes);
    if (error != cudaSuccess) return error;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, blocks_of_one * multiprocessors));
    return cudaLaunchKernel(kernel, blocks, kThreads, arguments, ThisProgram::kSharedBytes, stream);
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
