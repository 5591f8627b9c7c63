// The ops that make gradients of sufficient factors, and their CPU kernels; outer_product_gpu.cc has the
// GPU's.
//
// Tests: tests/communicator/test_ops.py.

#include "outer_product.h"

#include <algorithm>
#include <string>

#include "dtypes.h"
#include "outer_product_kernel.h"
#include "process_communicator.h"
#include "provenance.h"
#include "sharding.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status OuterProductShape(InferenceContext* c) {
  ShapeHandle u, v;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &u));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &v));
  DimensionHandle rows;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(u, 0), c->Dim(v, 0), &rows));
  c->set_output(0, c->Matrix(c->Dim(u, 1), c->Dim(v, 1)));
  return absl::OkStatus();
}

absl::Status BiasShape(InferenceContext* c) {
  ShapeHandle v;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &v));
  c->set_output(0, c->Vector(c->Dim(v, 1)));
  return absl::OkStatus();
}

REGISTER_OP("SufficientFactorOuterProduct")
    .Input("u: T")
    .Input("v: T")
    .Output("product: Tout")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tout: {half, bfloat16, float, double}")
    .SetShapeFn(OuterProductShape)
    .Doc(R"doc(
Makes the gradient of a dense layer from its sufficient factors (USENIX ATC 2017, section 3.2).

Half and bfloat16 are multiplied and added in float, and rounded once. On the CPU products are added in the
order of the rows whatever the number of threads: the same factors give the same bits everywhere. On GPUs,
whose kernel takes no double, they do so on one model of GPU; float is read as TensorFloat-32 where
TensorFlow's own products read it so.

u: [K, M], the layer's inputs. K may be 0.
v: [K, N], the errors of its outputs.
product: [M, N], the sum over k of the outer products of u[k] and v[k].
Tout: T, or float for half and bfloat16.
)doc");

REGISTER_OP("SufficientFactorBias")
    .Input("v: T")
    .Output("sum: Tout")
    .Attr("T: {half, bfloat16, float, double}")
    .Attr("Tout: {half, bfloat16, float, double}")
    .SetShapeFn(BiasShape)
    .Doc(R"doc(
Makes the gradient of a dense layer's bias from the factor V: it needs no message of its own.

v: [K, N], the errors of the layer's outputs. K may be 0.
sum: [N], the sum of the rows, added in their order.
Tout: T, or float for half and bfloat16.
)doc");

// Fails the construction of a kernel whose types do not go together.
void CheckTypes(OpKernelConstruction* context) {
  const tensorflow::DataType in = context->input_type(0), out = context->output_type(0);
  const bool is_half = in == tensorflow::DT_HALF || in == tensorflow::DT_BFLOAT16;
  OP_REQUIRES(context, in == out || (is_half && out == tensorflow::DT_FLOAT),
              absl::InvalidArgumentError(absl::StrCat(context->def().op(), " cannot make ", DataTypeString(out), " of ",
                                                      DataTypeString(in),
                                                      "; the types must be equal, or float of half or bfloat16.")));
}

// What a timeline calls a product: by its site, or by the node where a program uses the op itself.
std::string ShownName(OpKernelConstruction* context) {
  const std::string site = SiteOf(context);
  return site.empty() ? context->def().name() : site;
}

class CpuOuterProductKernel : public OuterProductKernel {
 public:
  using OuterProductKernel::OuterProductKernel;

 protected:
  void Multiply(OpKernelContext* context, const Tensor& u, const Tensor& v, Tensor* out) override {
    const OuterProduct product{ToDataType(u.dtype()),
                               ToDataType(out->dtype()),
                               u.data(),
                               v.data(),
                               u.dim_size(0),
                               u.dim_size(1),
                               v.dim_size(1),
                               out->data()};

    // Threads share columns if these are enough for all, since then each packs its own part of V.
    auto* workers = context->device()->tensorflow_cpu_worker_threads();
    const int64_t threads = workers->num_threads;
    const bool by_columns = product.n >= 4 * kColumnGranularity * threads;
    const int64_t granularity = by_columns ? kColumnGranularity : kRowGranularity;
    const int64_t size = by_columns ? product.n : product.m;
    const int64_t units = (size + granularity - 1) / granularity;
    const double flops = 2.0 * product.k * product.m * product.n;
    const int64_t shards = flops < kSmallWork ? 1 : std::min(threads, units);
    const int64_t step = (units + shards - 1) / shards * granularity;
    auto run = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * step; i < std::min(end * step, size); i += step) {
        const int64_t stop = std::min(i + step, size);
        if (by_columns) {
          poseidon::Compute(product, 0, product.m, i, stop);
        } else {
          poseidon::Compute(product, i, stop, 0, product.n);
        }
      }
    };
    if (shards == 1) return run(0, 1);
    poseidon::ForBlocks(workers->workers, shards, /*block_size=*/1, run);
  }

 private:
  static constexpr int64_t kRowGranularity = 12;  // the tiles' height
  static constexpr double kSmallWork = 2e6;       // not worth waking another thread
};

class CpuBiasKernel : public BiasKernel {
 public:
  using BiasKernel::BiasKernel;

 protected:
  void Sum(OpKernelContext*, const Tensor& v, Tensor* out) override {
    SumRows(ToDataType(v.dtype()), ToDataType(out->dtype()), v.data(), v.dim_size(0), v.dim_size(1), out->data());
  }
};

REGISTER_KERNEL_BUILDER(Name("SufficientFactorOuterProduct").Device(tensorflow::DEVICE_CPU), CpuOuterProductKernel);
REGISTER_KERNEL_BUILDER(Name("SufficientFactorBias").Device(tensorflow::DEVICE_CPU), CpuBiasKernel);

}  // namespace

OuterProductKernel::OuterProductKernel(OpKernelConstruction* context) : OpKernel(context), site_(ShownName(context)) {
  CheckTypes(context);
}

void OuterProductKernel::Compute(OpKernelContext* context) {
  const RebuildEvent event(site_);  // of a GPU's work, the start
  const Tensor& u = context->input(0);
  const Tensor& v = context->input(1);
  OP_REQUIRES(
      context,
      TensorShapeUtils::IsMatrix(u.shape()) && TensorShapeUtils::IsMatrix(v.shape()) && u.dim_size(0) == v.dim_size(0),
      absl::InvalidArgumentError(absl::StrCat("SufficientFactorOuterProduct got u ", u.shape().DebugString(), " and v ",
                                              v.shape().DebugString(), "; expected [K, M] and [K, N].")));
  Tensor* out = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({u.dim_size(1), v.dim_size(1)}), &out));
  if (out->NumElements() > 0) Multiply(context, u, v, out);
}

BiasKernel::BiasKernel(OpKernelConstruction* context) : OpKernel(context), site_(ShownName(context)) {
  CheckTypes(context);
}

void BiasKernel::Compute(OpKernelContext* context) {
  const RebuildEvent event(site_);  // of a GPU's work, the start
  const Tensor& v = context->input(0);
  OP_REQUIRES(context, TensorShapeUtils::IsMatrix(v.shape()),
              absl::InvalidArgumentError(
                  absl::StrCat("SufficientFactorBias got v ", v.shape().DebugString(), "; expected [K, N].")));
  Tensor* out = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({v.dim_size(1)}), &out));
  Sum(context, v, out);
}

}  // namespace poseidon

extern "C" __attribute__((visibility("default"))) bool poseidon_has_fused_multiply_add() {
  return poseidon::HasFusedMultiplyAdd();
}
