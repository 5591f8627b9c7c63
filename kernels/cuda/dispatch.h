// From the arguments of a call to the program that does it. Shared by the GPU and its emulation:
// `Launcher` has int Run<Program>(arguments), which starts blocks for the tiles [0,
// arguments.end_tile).

#ifndef POSEIDON_CUDA_DISPATCH_H_
#define POSEIDON_CUDA_DISPATCH_H_

#include <algorithm>

#include "block.h"
#include "outer_product.h"

namespace poseidon {

constexpr int kSuccess = 0;       // cudaSuccess
constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

// Whether all rows of `columns` elements begin at multiples of `bytes`.
template <typename T>
bool IsAligned(const T* data, int64_t columns, int bytes) {
  const auto row_bytes = static_cast<uint64_t>(columns) * sizeof(T);
  return (reinterpret_cast<uintptr_t>(data) | row_bytes) % bytes == 0;
}

template <typename T>
Factor MakeFactor(const void* data, int64_t columns) {
  const T* elements = static_cast<const T*>(data);
  const int copy_bytes = IsAligned(elements, columns, 16) ? 16 : IsAligned(elements, columns, 4) ? 4 : 2;
  return {static_cast<const char*>(data), columns, copy_bytes};
}

template <typename Product, typename T, typename Epilogue, typename Launcher>
int Launch(Launcher& launcher, const PoseidonFactors& f, const Epilogue& epilogue) {
  const int64_t tiles = Tile::Count(f.m) * Tile::Count(f.n);
  const typename Program<Product, Epilogue>::Arguments arguments = {
      {MakeFactor<T>(f.u, f.m), MakeFactor<T>(f.v, f.n), f.k, tiles}, epilogue};
  return launcher.template Run<Program<Product, Epilogue>>(arguments);
}

// Whether the copy engine, which numbers rows and columns with 32 bits, can copy the factors.
template <typename T>
bool FitCopyEngine(const PoseidonFactors& f) {
  return IsAligned(static_cast<const T*>(f.u), f.m, 16) && IsAligned(static_cast<const T*>(f.v), f.n, 16) &&
         std::max({f.k, f.m, f.n}) <= INT32_MAX - kTile;
}

// For factors of a 16-bit type.
template <typename T, typename Epilogue, typename Launcher>
int LaunchHalves(Launcher& launcher, const PoseidonFactors& f, const Epilogue& epilogue) {
  if (launcher.HasWarpgroups() && f.k > 0 && FitCopyEngine<T>(f)) {
    return Launch<WarpgroupTensorCores<T, Epilogue::kRunSize>, T>(launcher, f, epilogue);
  }
  return Launch<TensorCores<T, Epilogue::kRunSize>, T>(launcher, f, epilogue);
}

// For results of float32, which factors of all types have.
template <typename Epilogue, typename Launcher>
int LaunchType(Launcher& launcher, const PoseidonFactors& f, const Epilogue& epilogue) {
  switch (f.type) {
    case POSEIDON_FLOAT32:
      return Launch<PlainFloats, float>(launcher, f, epilogue);
    case POSEIDON_TF32:
      return Launch<TensorCores<Tf32, 4>, Tf32>(launcher, f, epilogue);
    case POSEIDON_BFLOAT16:
      return LaunchHalves<Bfloat16>(launcher, f, epilogue);
    case POSEIDON_HALF:
      return LaunchHalves<Float16>(launcher, f, epilogue);
  }
  return kInvalidValue;
}

// Whether the factors, and results of m * n elements at `out`, can be what the caller means.
inline bool IsValid(const PoseidonFactors* f, const void* out) {
  if (!f || f->type < POSEIDON_FLOAT32 || f->type > POSEIDON_TF32) return false;
  if (f->k < 0 || f->m < 0 || f->n < 0) return false;
  return f->m == 0 || f->n == 0 || (out && (f->k == 0 || (f->u && f->v)));
}

template <bool kReadsOut, typename Launcher>
int LaunchCombine(Launcher& launcher, const PoseidonFactors& f, float alpha, float beta, void* out,
                  PoseidonType out_type) {
  const bool is_aligned = IsAligned(static_cast<char*>(out), f.n * (out_type == POSEIDON_FLOAT32 ? 4 : 2), 16);
  switch (out_type) {
    case POSEIDON_BFLOAT16: {
      const Combine<Bfloat16, kReadsOut> combine = {alpha, beta, static_cast<Bfloat16*>(out), is_aligned};
      return LaunchHalves<Bfloat16>(launcher, f, combine);
    }
    case POSEIDON_HALF: {
      const Combine<Float16, kReadsOut> combine = {alpha, beta, static_cast<Float16*>(out), is_aligned};
      return LaunchHalves<Float16>(launcher, f, combine);
    }
    default: {
      const Combine<float, kReadsOut> combine = {alpha, beta, static_cast<float*>(out), is_aligned};
      return LaunchType(launcher, f, combine);
    }
  }
}

template <typename Launcher>
int OuterProduct(Launcher& launcher, const PoseidonFactors* factors, float alpha, float beta, void* out,
                 PoseidonType out_type) {
  if (!IsValid(factors, out)) return kInvalidValue;
  if (out_type != POSEIDON_FLOAT32 && (out_type != factors->type || out_type == POSEIDON_TF32)) {
    return kInvalidValue;
  }
  PoseidonFactors f = *factors;
  if (f.m == 0 || f.n == 0) return kSuccess;
  if (alpha == 0) f.k = 0;
  return beta == 0 ? LaunchCombine<false>(launcher, f, alpha, beta, out, out_type)
                   : LaunchCombine<true>(launcher, f, alpha, beta, out, out_type);
}

template <typename Launcher>
int Update(Launcher& launcher, const PoseidonFactors* factors, float learning_rate, float momentum, bool nesterov,
           float* velocity, float* weights) {
  if (!IsValid(factors, weights) || (momentum != 0 && !velocity)) return kInvalidValue;
  const PoseidonFactors& f = *factors;
  if (f.m == 0 || f.n == 0) return kSuccess;
  const bool is_aligned = IsAligned(weights, f.n, 16);
  if (!velocity) {
    const Descend<false> descend = {learning_rate, 0, false, nullptr, weights, is_aligned};
    return LaunchType(launcher, f, descend);
  }
  const Descend<true> descend = {learning_rate, momentum, nesterov,
                                 velocity,      weights,  is_aligned && IsAligned(velocity, f.n, 16)};
  return LaunchType(launcher, f, descend);
}

}  // namespace poseidon

#endif  // POSEIDON_CUDA_DISPATCH_H_
