// The ops that give each rank its rows of a global batch, and sizes of its own in place of global ones. The
// partition pass puts them into a graph; see PoseidonPart.
//
// Tests: tests/communicator/test_row_ops.py.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "process_communicator.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Fails unless lists that have an element for each input do.
absl::Status CheckLength(const std::string& attr, size_t length, size_t inputs) {
  if (length == inputs) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", attr, "' has ", length, " elements, but there are ", inputs, " inputs; expected one each."));
}

// Checks the last inputs of an op, none or one part; returns in `others` how many inputs come before.
absl::Status CheckGivenPart(InferenceContext* c, int* others) {
  int64_t parts;
  if (!c->GetAttr("M", &parts).ok()) parts = 0;  // graphs that were written node by node may lack what has a default
  if (parts > 1) return absl::InvalidArgumentError(absl::StrCat("'M' is ", parts, ", expected 0 or 1."));
  *others = c->num_inputs() - static_cast<int>(parts);
  ShapeHandle part;
  return parts ? c->Merge(c->input(*others), c->Vector(3), &part) : absl::OkStatus();
}

absl::Status RowsShape(InferenceContext* c) {
  std::vector<int64_t> dimensions, elements;
  int64_t rows;
  int values;
  TF_RETURN_IF_ERROR(CheckGivenPart(c, &values));
  TF_RETURN_IF_ERROR(c->GetAttr("dimensions", &dimensions));
  // Graphs that were written node by node may lack what has a default.
  if (!c->GetAttr("elements", &elements).ok()) elements.clear();
  if (!c->GetAttr("rows", &rows).ok()) rows = -1;  // PoseidonRows has none
  TF_RETURN_IF_ERROR(CheckLength("dimensions", dimensions.size(), values));
  if (elements.empty()) elements.assign(dimensions.size(), 1);
  TF_RETURN_IF_ERROR(CheckLength("elements", elements.size(), values));
  for (int i = 0; i < values; ++i) {
    ShapeHandle shape = c->input(i);
    if (dimensions[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat("'dimensions' has ", dimensions[i], ", expected 0 or more."));
    }
    TF_RETURN_IF_ERROR(c->WithRankAtLeast(shape, dimensions[i] + 1, &shape));
    if (rows >= 0 && c->RankKnown(shape)) {
      int64_t size;
      if (__builtin_mul_overflow(rows, elements[i], &size)) {
        return absl::InvalidArgumentError(absl::StrCat("'rows' is ", rows, " and 'elements' has ", elements[i],
                                                       ", expected a product of at most 2^63 - 1."));
      }
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, dimensions[i], c->MakeDim(size), &shape));
    }
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status PartShape(InferenceContext* c) {
  int sizes;
  TF_RETURN_IF_ERROR(CheckGivenPart(c, &sizes));
  for (int i = 0; i < sizes; ++i) {
    ShapeHandle scalar;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
  }
  c->set_output(0, c->Vector(3));
  c->set_output(1, c->Scalar());
  c->set_output(2, c->Scalar());
  return absl::OkStatus();
}

// Checks the inputs (shape, part) against the attribute `dimension`, as far as they are known.
absl::Status CheckShapeAndPart(InferenceContext* c, int64_t* dimension) {
  ShapeHandle part;
  TF_RETURN_IF_ERROR(c->GetAttr("dimension", dimension));
  TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->Vector(3), &part));
  const ShapeHandle shape = c->input(0);
  const DimensionHandle length = c->RankKnown(shape) && c->Rank(shape) == 1 ? c->Dim(shape, 0) : c->UnknownDim();
  if (c->ValueKnown(length) && c->Value(length) <= *dimension) {
    return absl::InvalidArgumentError(absl::StrCat("'shape' has ", c->Value(length),
                                                   " elements, expected more than "
                                                   "'dimension', which is ",
                                                   *dimension, "."));
  }
  return absl::OkStatus();
}

absl::Status OtherSizeShape(InferenceContext* c) {
  int64_t dimension;
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(CheckShapeAndPart(c, &dimension));
  TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(0), 1, &shape));
  if (dimension > 0) TF_RETURN_IF_ERROR(c->WithRank(shape, 1, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

absl::Status RowRangeShape(InferenceContext* c) {
  int64_t dimension;
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(CheckShapeAndPart(c, &dimension));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &shape));
  c->set_output(0, c->Vector(dimension + 1));
  c->set_output(1, c->Vector(dimension + 1));
  return absl::OkStatus();
}

REGISTER_OP("PoseidonRows")
    .Input("values: T")
    .Input("part: M * int64")
    .Output("outputs: T")
    .Attr("T: list(type) >= 1")
    .Attr("M: int >= 0 = 0")
    .Attr("dimensions: list(int)")
    .Attr("names: list(string)")
    .Attr("elements: list(int) = []")
    .SetShapeFn(RowsShape)
    .Doc(R"doc(
Marks the inputs of a step whose rows the partition pass gives to the ranks.

In a graph that was not rewritten it returns its inputs: every rank computes the whole global batch. Where ranks were
given their own rows alone, it fails unless these are all rows.

values: Tensors of the global batch, all with the same number of rows; or this rank's rows of them.
part: Nothing, or one [3] that says which rows these are: the rows of the global batch, the first one of this rank's,
  and how many it has; 0 if the value has a padding row.
outputs: The same tensors.
dimensions: For each value, the dimension along which it has rows.
names: For each value, its name for messages.
elements: For each value, how many elements of that dimension belong to one row; empty if each has one.
)doc");

REGISTER_OP("PoseidonUsualRows")
    .Input("values: T")
    .Output("outputs: T")
    .Attr("T: list(type) >= 1")
    .Attr("dimensions: list(int)")
    .Attr("names: list(string)")
    .Attr("elements: list(int) = []")
    .Attr("rows: int")
    .SetShapeFn(RowsShape)
    .Doc(R"doc(
Stands for PoseidonRows where shapes are inferred for planning. It has no kernel, since these shapes hold for one batch.

values, outputs, dimensions, names, elements: Same as in PoseidonRows.
rows: The number of rows that the outputs are given.
)doc");

REGISTER_OP("PoseidonPart")
    .Input("sizes: N * int64")
    .Input("given: M * int64")
    .Output("part: int64")
    .Output("contributes: bool")
    .Output("is_first: bool")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0 = 0")
    .Attr("names: list(string)")
    .Attr("site: string")
    .SetIsStateful()
    .SetShapeFn(PartShape)
    .Doc(R"doc(
Says which rows of a global batch are this rank's.

The parts of the ranks are contiguous. Unless shares were set, they differ by at most one row, and lower ranks get the
larger ones. A rank
without rows computes the first one as a padding row, since many layers need at least one, and does not contribute.
If the batch has no rows, no rank gets any, and rank 0 contributes. Stateful, since it depends on the job.

sizes: Scalars, the rows of each input of the step, which must be equal.
given: Nothing, or the part of PoseidonRows: the inputs have this rank's rows alone, and `sizes` are their numbers.
part: [3]: the rows of the global batch, the first row of this rank's part, and how many it has.
contributes: A scalar. False where the row is a padding row.
is_first: A scalar. Whether this is rank 0.
names: For each size, the name of the input for messages.
site: The name of the step for messages.
)doc");

REGISTER_OP("PoseidonLocalShape")
    .Input("shape: Tshape")
    .Input("part: int64")
    .Output("local: Tshape")
    .Attr("Tshape: {int32, int64}")
    .Attr("dimension: int >= 0")
    .SetShapeFn(OtherSizeShape)
    .Doc(R"doc(
Makes the shape of this rank's rows from the shape of a tensor with all rows of the global batch.

shape: A vector, or a scalar that is a single size.
part: From PoseidonPart.
local: The shape, with its element `dimension` divided by the rows of the global batch and multiplied by this
  rank's. -1 stays -1. Fails where the element is no multiple of the rows.
dimension: The element to change, which may be a multiple of the rows; 0 of a scalar.
)doc");

REGISTER_OP("PoseidonGlobalShape")
    .Input("shape: Tshape")
    .Input("part: int64")
    .Output("whole: Tshape")
    .Attr("Tshape: {int32, int64}")
    .Attr("dimension: int >= 0")
    .SetShapeFn(OtherSizeShape)
    .Doc(R"doc(
Makes the shape of a tensor with all rows of the global batch from the shape of this rank's: the inverse of
PoseidonLocalShape.

shape: A vector, or a scalar that is a single size.
part: From PoseidonPart.
whole: The shape, with its element `dimension` divided by this rank's rows and multiplied by those of the global
  batch. -1 stays -1. Fails where the element is no multiple of this rank's rows.
dimension: The element to change, which may be a multiple of the rows; 0 of a scalar.
)doc");

REGISTER_OP("PoseidonRowRange")
    .Input("shape: Tshape")
    .Input("part: int64")
    .Output("begin: Tshape")
    .Output("end: Tshape")
    .Attr("Tshape: {int32, int64}")
    .Attr("dimension: int >= 0")
    .SetShapeFn(RowRangeShape)
    .Doc(R"doc(
Says where this rank's rows are in a tensor with all rows of the global batch, for StridedSlice.

shape: A vector, the tensor's shape.
part: From PoseidonPart.
begin: [dimension + 1]: zeros, and last where this rank's rows begin.
end: [dimension + 1]: zeros, and last where they end. StridedSlice needs begin_mask and end_mask for the
  dimensions that come before.
dimension: Along which dimension the tensor has the rows. Its size may be a multiple of them. Fails where it is
  not.
)doc");

// Which rows of a global batch are a rank's.
struct Part {
  int64_t total = 0;
  int64_t first = 0;
  int64_t count = 0;
};

// Reads a part, whose count is 0 for a padding row if `may_be_padding`.
absl::Status ReadPart(const Tensor& numbers, bool may_be_padding, Part* part) {
  if (numbers.dims() != 1 || numbers.dim_size(0) != 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("'part' has shape ", numbers.shape().DebugString(), ", expected [3]."));
  }
  const auto values = numbers.vec<int64_t>();
  *part = {values(0), values(1), values(2)};
  const bool is_part = part->first >= 0 && part->count >= 0 && part->first <= part->total - part->count &&
                       (may_be_padding || (part->count == 0) == (part->total == 0));
  if (is_part) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'part' is [", part->total, ", ", part->first, ", ", part->count,
                                                 "], expected the rows of a batch and a first row and number of rows "
                                                 "within them."));
}

// Reads the attribute M.
absl::Status NumGivenParts(OpKernelConstruction* context, int64_t* parts) {
  *parts = 0;
  return context->HasAttr("M") ? context->GetAttr("M", parts) : absl::OkStatus();
}

class RowsKernel : public OpKernel {
 public:
  explicit RowsKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dimensions", &dimensions_));
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    OP_REQUIRES_OK(context, NumGivenParts(context, &parts_));
    OP_REQUIRES_OK(context, CheckLength("dimensions", dimensions_.size(), num_inputs() - parts_));
    OP_REQUIRES_OK(context, CheckLength("names", names_.size(), num_inputs() - parts_));
  }

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override {
    const int values = num_inputs() - parts_;
    if (parts_ > 0) {
      Part part;
      OP_REQUIRES_OK(context, ReadPart(context->input(values), /*may_be_padding=*/true, &part));
      OP_REQUIRES(context, part.count == part.total,
                  absl::FailedPreconditionError(absl::StrCat(
                      "'", names_[0], "' has ", part.count, " rows of this rank, expected all ", part.total,
                      " of the global batch, since this graph was not partitioned; gather them from all ranks.")));
    }
    for (int i = 0; i < values; ++i) {
      const Tensor& value = context->input(i);
      OP_REQUIRES(
          context, dimensions_[i] >= 0 && dimensions_[i] < value.dims(),
          absl::InvalidArgumentError(absl::StrCat("'", names_[i], "' has shape ", value.shape().DebugString(),
                                                  ", expected one with rows along dimension ", dimensions_[i], ".")));
      context->set_output(i, value);
    }
  }

 private:
  int64_t parts_ = 0;
  std::vector<int64_t> dimensions_;
  std::vector<std::string> names_;
};

class PartKernel : public OpKernel {
 public:
  explicit PartKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES_OK(context, NumGivenParts(context, &parts_));
    OP_REQUIRES_OK(context, CheckLength("names", names_.size(), num_inputs() - parts_));
  }

  bool IsExpensive() override { return false; }

  void Compute(OpKernelContext* context) override {
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator) return;
    OpInputList sizes;
    OP_REQUIRES_OK(context, context->input_list("sizes", &sizes));
    OP_REQUIRES_OK(context, CheckSizes(sizes));
    const int64_t rows = sizes[0].scalar<int64_t>()();
    const int rank = communicator->rank();
    Part own;
    if (parts_ > 0) {
      OP_REQUIRES_OK(context, ReadPart(context->input(sizes.size()), /*may_be_padding=*/true, &own));
      const int64_t expected = own.count == 0 && own.total > 0 ? 1 : own.count;
      OP_REQUIRES(context, rows == expected,
                  absl::InvalidArgumentError(absl::StrCat("'", names_[0], "' has ", rows, " rows, expected ", expected,
                                                          ", this rank's of ", own.total, ".")));
    } else {
      const RowRange range = communicator->row_shares().Of(rows, rank, communicator->size());
      own = {rows, range.first, range.count};
    }
    Tensor *part, *contributes, *is_first;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({3}), &part));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &contributes));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({}), &is_first));

    const bool is_padding = own.count == 0 && own.total > 0;
    part->vec<int64_t>()(0) = own.total;
    part->vec<int64_t>()(1) = own.count == 0 ? 0 : own.first;
    part->vec<int64_t>()(2) = is_padding ? 1 : own.count;
    contributes->scalar<bool>()() = own.total == 0 ? rank == 0 : !is_padding;
    is_first->scalar<bool>()() = rank == 0;
  }

 private:
  absl::Status CheckSizes(const OpInputList& sizes) const {
    for (int i = 0; i < sizes.size(); ++i) {
      if (sizes[i].dims() != 0) {
        return absl::InvalidArgumentError(absl::StrCat("The number of rows of '", names_[i], "' has shape ",
                                                       sizes[i].shape().DebugString(), ", expected a scalar."));
      }
      const int64_t rows = sizes[i].scalar<int64_t>()(), first = sizes[0].scalar<int64_t>()();
      if (rows < 0) {
        return absl::InvalidArgumentError(absl::StrCat("'", names_[i], "' has ", rows, " rows, expected 0 or more."));
      }
      if (rows != first) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", names_[0], "' has ", first, " rows, but '", names_[i], "' has ", rows,
                         "; give both the same number "
                         "of rows, or name one of them as the same on all ranks with inputs=."));
      }
    }
    return absl::OkStatus();
  }

  int64_t parts_ = 0;
  std::vector<std::string> names_;
  std::string site_;
};

// An op of one size in a shape, and of a part.
template <typename Tshape>
class SizeKernel : public OpKernel {
 public:
  explicit SizeKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dimension", &dimension_));
  }

  bool IsExpensive() override { return false; }

 protected:
  absl::Status Fail(const std::string& sentence) const {
    return absl::InvalidArgumentError(absl::StrCat(type_string(), " '", name(), "': ", sentence));
  }

  absl::Status Read(OpKernelContext* context, bool may_be_scalar, Part* part, int64_t* size) const {
    const Tensor& shape = context->input(0);
    const bool has_size =
        shape.dims() == 1 ? dimension_ < shape.dim_size(0) : shape.dims() == 0 && may_be_scalar && dimension_ == 0;
    if (!has_size) {
      return Fail(absl::StrCat("'shape' is a tensor of shape ", shape.shape().DebugString(),
                               ", expected a vector of "
                               "more than ",
                               dimension_, " elements", may_be_scalar && dimension_ == 0 ? ", or a scalar." : "."));
    }
    *size = shape.flat<Tshape>()(dimension_);

    const absl::Status status = ReadPart(context->input(1), /*may_be_padding=*/false, part);
    if (!status.ok()) return Fail(std::string(status.message()));
    return absl::OkStatus();
  }

  // Computes from / rows * others.
  absl::Status Scale(int64_t from, int64_t rows, int64_t others, int64_t* result) const {
    if (from < 0 || (rows > 0 ? from % rows : from) != 0) {
      return Fail(
          absl::StrCat("dimension ", dimension_, " of 'shape' is ", from, ", expected ",
                       rows > 0 ? absl::StrCat("a multiple of its ", rows, " rows.") : "0, since there are no rows."));
    }
    const int64_t factor = rows > 0 ? from / rows : 0;
    if (__builtin_mul_overflow(factor, others, result) || *result > std::numeric_limits<Tshape>::max()) {
      return Fail(absl::StrCat("dimension ", dimension_, " of the result is ", factor, " * ", others,
                               ", expected at "
                               "most ",
                               std::numeric_limits<Tshape>::max(), "."));
    }
    return absl::OkStatus();
  }

  int64_t dimension_ = 0;
};

// PoseidonLocalShape, and PoseidonGlobalShape if `is_inverse`.
template <typename Tshape, bool is_inverse>
class ShapeKernel : public SizeKernel<Tshape> {
 public:
  using SizeKernel<Tshape>::SizeKernel;

  void Compute(OpKernelContext* context) override {
    Part part;
    int64_t size, result = -1;
    OP_REQUIRES_OK(context, this->Read(context, /*may_be_scalar=*/true, &part, &size));
    if (size != -1) {
      const int64_t from = is_inverse ? part.count : part.total, to = is_inverse ? part.total : part.count;
      OP_REQUIRES_OK(context, this->Scale(size, from, to, &result));
    }
    const Tensor& shape = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape.shape(), &output));
    output->flat<Tshape>() = shape.flat<Tshape>();
    output->flat<Tshape>()(this->dimension_) = static_cast<Tshape>(result);
  }
};

template <typename Tshape>
class RowRangeKernel : public SizeKernel<Tshape> {
 public:
  using SizeKernel<Tshape>::SizeKernel;

  void Compute(OpKernelContext* context) override {
    Part part;
    int64_t size;
    OP_REQUIRES_OK(context, this->Read(context, /*may_be_scalar=*/false, &part, &size));
    const int64_t rows[] = {part.first, part.first + part.count};
    for (int i : {0, 1}) {
      int64_t row;
      OP_REQUIRES_OK(context, this->Scale(size, part.total, rows[i], &row));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, TensorShape({this->dimension_ + 1}), &output));
      output->flat<Tshape>().setZero();
      output->flat<Tshape>()(this->dimension_) = static_cast<Tshape>(row);
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonRows").Device(tensorflow::DEVICE_CPU), RowsKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonRows").Device(tensorflow::DEVICE_DEFAULT), RowsKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonPart").Device(tensorflow::DEVICE_CPU), PartKernel);

#define REGISTER_SIZE_KERNELS(Tshape)                                                                                  \
  REGISTER_KERNEL_BUILDER(Name("PoseidonLocalShape").Device(tensorflow::DEVICE_CPU).TypeConstraint<Tshape>("Tshape"),  \
                          ShapeKernel<Tshape, /*is_inverse=*/false>);                                                  \
  REGISTER_KERNEL_BUILDER(Name("PoseidonGlobalShape").Device(tensorflow::DEVICE_CPU).TypeConstraint<Tshape>("Tshape"), \
                          ShapeKernel<Tshape, /*is_inverse=*/true>);                                                   \
  REGISTER_KERNEL_BUILDER(Name("PoseidonRowRange").Device(tensorflow::DEVICE_CPU).TypeConstraint<Tshape>("Tshape"),    \
                          RowRangeKernel<Tshape>)
REGISTER_SIZE_KERNELS(int32_t);
REGISTER_SIZE_KERNELS(int64_t);
#undef REGISTER_SIZE_KERNELS

}  // namespace
}  // namespace poseidon
