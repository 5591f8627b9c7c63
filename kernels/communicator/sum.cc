// Sums tensors in rank order: one pass over memory, block by block, compiled for AVX2 as well
// and chosen at run time; and rows, list by list.
//
// Tests: tests/communicator/test_communicator.py, tests/communicator/test_ops.py.

#include "sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "arithmetic.h"

// Choosing comes before the sanitizer of threads is ready, which crashes in it.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define POSEIDON_MULTIVERSION __attribute__((target_clones("default", "arch=haswell")))
#else
#define POSEIDON_MULTIVERSION
#endif

namespace poseidon {
namespace {

// Elements added up before the block is written: small enough for the first-level cache.
constexpr size_t kBlock = 2048;

template <typename From, typename Accumulator>
[[gnu::always_inline]] inline void LoadBlock(const void* input, size_t begin, size_t n, Accumulator* sum) {
  const From* from = static_cast<const From*>(input) + begin;
  for (size_t i = 0; i < n; ++i) sum[i] = Arithmetic<From>::Load(from[i]);
}

template <typename From, typename Accumulator>
[[gnu::always_inline]] inline void AddBlock(const void* input, size_t begin, size_t n, Accumulator* sum) {
  const From* from = static_cast<const From*>(input) + begin;
  for (size_t i = 0; i < n; ++i) sum[i] += Arithmetic<From>::Load(from[i]);
}

template <typename T>
[[gnu::always_inline]] inline void SumBlocks(const Summand* inputs, size_t num_inputs, size_t count, void* output) {
  using A = Arithmetic<T>;
  typename A::Accumulator sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    for (size_t k = 0; k < num_inputs; ++k) {
      const void* input = inputs[k].data;
      const bool is_first = k == 0;
      if (std::is_same_v<T, float> && inputs[k].dtype == DataType::kFloat16) {
        is_first ? LoadBlock<Float16>(input, begin, n, sum) : AddBlock<Float16>(input, begin, n, sum);
      } else if (std::is_same_v<T, float> && inputs[k].dtype == DataType::kBfloat16) {
        is_first ? LoadBlock<Bfloat16>(input, begin, n, sum) : AddBlock<Bfloat16>(input, begin, n, sum);
      } else {
        is_first ? LoadBlock<T>(input, begin, n, sum) : AddBlock<T>(input, begin, n, sum);
      }
    }
    T* out = static_cast<T*>(output) + begin;
    for (size_t i = 0; i < n; ++i) out[i] = A::Store(sum[i]);
  }
}

// Signed overflow is undefined; counters that wrap must still agree on all ranks, hence unsigned.
#define POSEIDON_SUM(name, type)                                                                          \
  POSEIDON_MULTIVERSION void name(const Summand* inputs, size_t num_inputs, size_t count, void* output) { \
    SumBlocks<type>(inputs, num_inputs, count, output);                                                   \
  }
POSEIDON_SUM(SumFloat32, float)
POSEIDON_SUM(SumFloat64, double)
POSEIDON_SUM(SumFloat16, Float16)
POSEIDON_SUM(SumBfloat16, Bfloat16)
POSEIDON_SUM(SumInt32, uint32_t)
POSEIDON_SUM(SumInt64, uint64_t)
#undef POSEIDON_SUM

template <typename T>
void SumRowsOf(const void* values, int64_t columns, const RowLists& lists, void* output) {
  const T* const from = static_cast<const T*>(values);
  T* out = static_cast<T*>(output);
  std::vector<typename Arithmetic<T>::Accumulator> sum;
  for (int64_t i = 0; i < lists.count; ++i, out += columns) {
    const int64_t begin = lists.begins[i], end = lists.begins[i + 1];
    if (begin == end) {
      std::memset(out, 0, columns * sizeof(T));
      continue;
    }
    if (end - begin == 1) {
      std::memcpy(out, from + lists.rows[begin] * columns, columns * sizeof(T));
      continue;
    }
    sum.assign(columns, 0);
    for (int64_t k = begin; k < end; ++k) {
      const T* const row = from + lists.rows[k] * columns;
      for (int64_t j = 0; j < columns; ++j) sum[j] += Arithmetic<T>::Load(row[j]);
    }
    for (int64_t j = 0; j < columns; ++j) out[j] = Arithmetic<T>::Store(sum[j]);
  }
}

struct TypeInfo {
  const char* name;
  size_t bytes;
  void (*sum)(const Summand*, size_t, size_t, void*);
  void (*sum_rows)(const void*, int64_t, const RowLists&, void*);
};

const TypeInfo& Info(DataType dtype) {
  static constexpr TypeInfo kInfo[] = {
      {"float32", 4, SumFloat32, SumRowsOf<float>},
      {"float64", 8, SumFloat64, SumRowsOf<double>},
      {"float16", 2, SumFloat16, SumRowsOf<Float16>},
      {"bfloat16", 2, SumBfloat16, SumRowsOf<Bfloat16>},
      {"int32", 4, SumInt32, SumRowsOf<uint32_t>},
      {"int64", 8, SumInt64, SumRowsOf<uint64_t>},
      {"bytes", 1, nullptr, nullptr},
  };
  return kInfo[static_cast<int>(dtype)];
}

template <typename From, typename To>
[[gnu::always_inline]] inline void ConvertElements(const void* from, int64_t count, void* out) {
  const From* const in = static_cast<const From*>(from);
  To* const to = static_cast<To*>(out);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = Arithmetic<To>::Store(static_cast<float>(Arithmetic<From>::Load(in[i])));
  }
}

POSEIDON_MULTIVERSION void ConvertAny(DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out) {
  if (dtype == DataType::kFloat32) return ConvertElements<float, Bfloat16>(from, count, out);
  if (dtype == DataType::kFloat64) return ConvertElements<double, Bfloat16>(from, count, out);
  if (out_dtype == DataType::kFloat32) return ConvertElements<Bfloat16, float>(from, count, out);
  ConvertElements<Bfloat16, double>(from, count, out);
}

}  // namespace

size_t ElementBytes(DataType dtype) { return Info(dtype).bytes; }

const char* Name(DataType dtype) { return Info(dtype).name; }

bool CanBeSummand(DataType dtype, DataType of_sum) {
  const bool is_half = dtype == DataType::kFloat16 || dtype == DataType::kBfloat16;
  return dtype == of_sum || (is_half && of_sum == DataType::kFloat32);
}

void SumInOrder(DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output) {
  if (inputs.empty()) {
    std::memset(output, 0, bytes);
  } else if (inputs.size() == 1 && inputs[0].dtype == dtype) {
    if (inputs[0].data != output) std::memcpy(output, inputs[0].data, bytes);
  } else {
    Info(dtype).sum(inputs.data(), inputs.size(), bytes / ElementBytes(dtype), output);
  }
}

void SumOfSums(DataType dtype, const std::vector<std::vector<Summand>>& groups, size_t bytes, void* output) {
  std::vector<Summand> sums;
  for (const std::vector<Summand>& group : groups) {
    // Of the first group, (a + b) + c is a + b + c, but where a + b is rounded to less than it is added in.
    if (group.size() < 2 || (sums.empty() && ElementBytes(dtype) > 2)) {
      sums.insert(sums.end(), group.begin(), group.end());
    } else {
      SumInOrder(dtype, group, bytes, output);
      sums.push_back({output, dtype});
    }
  }
  SumInOrder(dtype, sums, bytes, output);
}

void SumRows(DataType dtype, const void* values, int64_t columns, const RowLists& lists, void* output) {
  Info(dtype).sum_rows(values, columns, lists, output);
}

void Convert(DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out) {
  ConvertAny(dtype, from, count, out_dtype, out);
}

}  // namespace poseidon
