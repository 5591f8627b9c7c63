// Multiplies factors, and adds up their rows, on the CPU.
//
// A tile of the result stays in registers while its products are added up; the factors are packed
// so that the inner loop reads both in order (K. Goto and R. van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008). Compiled for several instruction sets and chosen
// at run time.
//
// Tests: tests/communicator/test_ops.py.

#include "outer_product.h"

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>

#include "arithmetic.h"

namespace poseidon {
namespace {

// Rows of U and V that are added up before the next tile: a panel of V fits into the first-level
// cache. The bytes of V and U that are packed at a time share the second-level cache.
constexpr int64_t kBlockK = 256;
constexpr int64_t kPackedBytesV = int64_t{256} << 10;
constexpr int64_t kPackedBytesU = int64_t{384} << 10;

constexpr std::align_val_t kAlignment{64};

// Memory for packed factors. A little of it stays with the thread for its next call, since fresh
// memory costs a page fault per 4 KiB.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    thread_local Buffer kept(new (kAlignment) char[kKeptBytes]);
    if (bytes > kKeptBytes) own_.reset(new (kAlignment) char[bytes]);
    data_ = own_ ? own_.get() : kept.get();
  }
  void* data() const { return data_; }

 private:
  struct Free {
    void operator()(char* data) const { ::operator delete[](data, kAlignment); }
  };
  using Buffer = std::unique_ptr<char[], Free>;
  static constexpr size_t kKeptBytes = size_t{1} << 20;

  Buffer own_;
  char* data_;
};

// One instruction set: vectors of kVectorBytes, tiles of kRows rows and kVectors vectors.
template <typename T, typename Out, int kVectorBytes, int kRows, int kVectors>
struct Tiles {
  using Accumulator = typename Arithmetic<T>::Accumulator;
  typedef Accumulator Vector __attribute__((vector_size(kVectorBytes)));
  typedef Accumulator UnalignedVector
      __attribute__((vector_size(kVectorBytes), aligned(alignof(Accumulator)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(Accumulator);
  static constexpr int kColumns = kVectors * kLanes;
  // The sum of a block of rows can wait in `out` for the next block only if nothing is rounded.
  static constexpr bool kSplitsK = std::is_same_v<Out, Accumulator>;

  static int64_t RoundUp(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

  // How many columns of `size` packed rows fit into `bytes`: a multiple of `width`, at least one.
  static int64_t Fitting(int64_t bytes, int64_t size, int64_t width) {
    const int64_t panel = size * width * static_cast<int64_t>(sizeof(Accumulator));
    return std::max<int64_t>(1, bytes / panel) * width;
  }

  // Packs `columns` columns of rows [k, k + size) from `begin` on: in panels of kWidth columns, the
  // last one filled up with zeros, which lie row by row.
  template <int kWidth>
  [[gnu::always_inline]] static inline void Pack(const T* matrix, int64_t stride, int64_t k, int64_t size,
                                                 int64_t begin, int64_t columns, Accumulator* packed) {
    for (int64_t row = 0; row < size; ++row) {
      const T* from = matrix + (k + row) * stride + begin;
      Accumulator* to = packed + row * kWidth;
      int64_t c = 0;
      for (; c + kWidth <= columns; c += kWidth, to += size * kWidth) {
        for (int i = 0; i < kWidth; ++i) to[i] = Arithmetic<T>::Load(from[c + i]);
      }
      if (c == columns) continue;
      for (int i = 0; i < kWidth; ++i) {
        to[i] = c + i < columns ? Arithmetic<T>::Load(from[c + i]) : Accumulator{0};
      }
    }
  }

  // Adds the products of one strip of U and one panel of V to a whole tile, or sets it.
  [[gnu::always_inline]] static inline void Multiply(const Accumulator* u, const Accumulator* v, int64_t size,
                                                     bool adds, Accumulator* tile, int64_t stride) {
    Vector sum[kRows][kVectors] = {};
    if (adds) {
      for (int r = 0; r < kRows; ++r) {
        const auto* from = reinterpret_cast<const UnalignedVector*>(tile + r * stride);
        for (int c = 0; c < kVectors; ++c) sum[r][c] = from[c];
      }
    }
    for (int64_t k = 0; k < size; ++k) {
      const auto* panel = reinterpret_cast<const Vector*>(v + k * kColumns);
      const Accumulator* strip = u + k * kRows;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[r][c] += strip[r] * panel[c];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      auto* to = reinterpret_cast<UnalignedVector*>(tile + r * stride);
      for (int c = 0; c < kVectors; ++c) to[c] = sum[r][c];
    }
  }

  // The same for a tile at the edge of `out`, which may have fewer rows and columns.
  [[gnu::always_inline]] static inline void Tile(const Accumulator* u, const Accumulator* v, int64_t size, bool adds,
                                                 Out* out, int64_t stride, int64_t rows, int64_t columns) {
    const bool is_whole = rows == kRows && columns == kColumns;
    if constexpr (kSplitsK) {
      if (is_whole) return Multiply(u, v, size, adds, out, stride);
    }
    alignas(64) Accumulator tile[kRows * kColumns] = {};
    if constexpr (kSplitsK) {
      for (int64_t r = 0; adds && r < rows; ++r) {
        std::copy_n(out + r * stride, columns, tile + r * kColumns);
      }
    }
    Multiply(u, v, size, adds, tile, kColumns);
    for (int64_t r = 0; r < rows; ++r) {
      const Accumulator* from = tile + r * kColumns;
      if (columns == kColumns) {
        for (int c = 0; c < kColumns; ++c) out[r * stride + c] = Arithmetic<Out>::Store(from[c]);
      } else {
        for (int64_t c = 0; c < columns; ++c) out[r * stride + c] = Arithmetic<Out>::Store(from[c]);
      }
    }
  }

  [[gnu::always_inline]] static inline void Run(const OuterProduct& product, int64_t row_begin, int64_t row_end,
                                                int64_t column_begin, int64_t column_end) {
    const T* u = static_cast<const T*>(product.u);
    const T* v = static_cast<const T*>(product.v);
    Out* out = static_cast<Out*>(product.out);
    const int64_t block_k = std::max<int64_t>(1, kSplitsK ? std::min(kBlockK, product.k) : product.k);
    const int64_t block_columns =
        std::min(Fitting(kPackedBytesV, block_k, kColumns), RoundUp(column_end - column_begin, kColumns));
    const int64_t block_rows = std::min(Fitting(kPackedBytesU, block_k, kRows), RoundUp(row_end - row_begin, kRows));
    const Scratch scratch(block_k * (block_rows + block_columns) * sizeof(Accumulator));
    auto* panels = static_cast<Accumulator*>(scratch.data());  // whole vectors, so they come first
    auto* strips = panels + block_k * block_columns;
    int64_t k = 0;
    do {  // once if there are no rows: the result is zero
      const int64_t size = std::min(block_k, product.k - k);
      for (int64_t i = row_begin; i < row_end; i += block_rows) {
        const int64_t rows = std::min(block_rows, row_end - i);
        Pack<kRows>(u, product.m, k, size, i, rows, strips);
        for (int64_t j = column_begin; j < column_end; j += block_columns) {
          const int64_t columns = std::min(block_columns, column_end - j);
          Pack<kColumns>(v, product.n, k, size, j, columns, panels);
          for (int64_t r = 0; r < rows; r += kRows) {
            for (int64_t c = 0; c < columns; c += kColumns) {
              Tile(strips + r * size, panels + c * size, size, k > 0, out + (i + r) * product.n + j + c, product.n,
                   std::min<int64_t>(kRows, rows - r), std::min<int64_t>(kColumns, columns - c));
            }
          }
        }
      }
      k += size;
    } while (k < product.k);
  }
};

using Range = void (*)(const OuterProduct&, int64_t, int64_t, int64_t, int64_t);

template <typename T, typename Out>
void Portable(const OuterProduct& product, int64_t row_begin, int64_t row_end, int64_t column_begin,
              int64_t column_end) {
  Tiles<T, Out, 16, 4, 2>::Run(product, row_begin, row_end, column_begin, column_end);
}

#if defined(__x86_64__)
template <typename T, typename Out>
__attribute__((target("avx2,fma"))) void Avx2(const OuterProduct& product, int64_t row_begin, int64_t row_end,
                                              int64_t column_begin, int64_t column_end) {
  Tiles<T, Out, 32, 6, 2>::Run(product, row_begin, row_end, column_begin, column_end);
}

template <typename T, typename Out>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))) void Avx512(const OuterProduct& product,
                                                                              int64_t row_begin, int64_t row_end,
                                                                              int64_t column_begin,
                                                                              int64_t column_end) {
  Tiles<T, Out, 64, 12, 2>::Run(product, row_begin, row_end, column_begin, column_end);
}

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

template <typename T, typename Out>
Range Choose() {
#if defined(__x86_64__)
  if (HasAvx512()) return Avx512<T, Out>;
  if (HasFusedMultiplyAdd()) return Avx2<T, Out>;
#endif
  return Portable<T, Out>;
}

template <typename T, typename Out>
void SumRowsOf(const void* rows, int64_t k, int64_t n, void* result) {
  using Accumulator = typename Arithmetic<T>::Accumulator;
  const T* v = static_cast<const T*>(rows);
  Out* out = static_cast<Out*>(result);
  auto sums = std::make_unique<Accumulator[]>(n);
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t c = 0; c < n; ++c) sums[c] += Arithmetic<T>::Load(v[row * n + c]);
  }
  for (int64_t c = 0; c < n; ++c) out[c] = Arithmetic<Out>::Store(sums[c]);
}

// The types that occur: calls `use` with an element of T and one of Out.
template <typename Use>
auto ForTypes(DataType dtype, DataType out_dtype, Use use) {
  const bool same = dtype == out_dtype;
  switch (dtype) {
    case DataType::kFloat64:
      return use(double{}, double{});
    case DataType::kFloat16:
      return same ? use(Float16{}, Float16{}) : use(Float16{}, float{});
    case DataType::kBfloat16:
      return same ? use(Bfloat16{}, Bfloat16{}) : use(Bfloat16{}, float{});
    default:
      return use(float{}, float{});
  }
}

}  // namespace

void Compute(const OuterProduct& product, int64_t row_begin, int64_t row_end, int64_t column_begin,
             int64_t column_end) {
  ForTypes(product.dtype, product.out_dtype, [](auto t, auto out) {
    static const Range range = Choose<decltype(t), decltype(out)>();
    return range;
  })(product, row_begin, row_end, column_begin, column_end);
}

void SumRows(DataType dtype, DataType out_dtype, const void* v, int64_t k, int64_t n, void* out) {
  ForTypes(dtype, out_dtype, [](auto t, auto o) { return SumRowsOf<decltype(t), decltype(o)>; })(v, k, n, out);
}

bool HasFusedMultiplyAdd() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;  // the architectures that are left have it in their baseline
#endif
}

}  // namespace poseidon
