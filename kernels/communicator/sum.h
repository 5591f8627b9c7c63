// Sums tensors in rank order, and rows in that of a list, so that every rank and every run gets the same bits.

#ifndef POSEIDON_COMMUNICATOR_SUM_H_
#define POSEIDON_COMMUNICATOR_SUM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace poseidon {

enum class DataType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBfloat16,
  kInt32,
  kInt64,
  kBytes,  // can be broadcast, not summed
};

size_t ElementBytes(DataType dtype);
const char* Name(DataType dtype);

// One tensor of a sum.
struct Summand {
  const void* data;
  DataType dtype;
};

// Whether tensors of a type can be summands of a sum of another type: half and bfloat16 are exact in float.
bool CanBeSummand(DataType dtype, DataType of_sum);

// Writes inputs[0] + inputs[1] + … to `output`, in that order; half and bfloat16 are added in
// float and rounded once. No inputs give zeros, one input gives its own bits. `output` may be one
// of the inputs of its type.
//
// Requires: CanBeSummand for each input; `bytes`, of the output, is a multiple of the element size; all pointers are
// aligned to it; with DataType::kBytes there is exactly one input.
void SumInOrder(DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output);

// Writes the sum of the groups' sums, all in order; the sum of a group is rounded like any other. At most one group
// may have several inputs: its sum is written to `output` on the way.
void SumOfSums(DataType dtype, const std::vector<std::vector<Summand>>& groups, size_t bytes, void* output);

// Which rows of a matrix are added up: for row i of the result rows[begins[i]] to rows[begins[i + 1] - 1], in this
// order.
struct RowLists {
  const int64_t* rows;
  const int64_t* begins;  // count + 1
  int64_t count;          // rows of the result
};

// Writes the sums of rows of `values`, a matrix with `columns` columns, to `output`; half and bfloat16 are added in
// float and rounded once. No rows give zeros, one row gives its own bits.
//
// Requires: all pointers are aligned to the element size; `dtype` is not DataType::kBytes.
void SumRows(DataType dtype, const void* values, int64_t columns, const RowLists& lists, void* output);

// Converts `count` elements of float or double to bfloat16, rounded to nearest, or back. A double is a float on the
// way.
void Convert(DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out);

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_SUM_H_
