// What the kernels of shards do on any device, and those of the CPU.
//
// Tests: tests/communicator/test_shards.py.

#include "shard_kernels.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "process_communicator.h"
#include "sharding.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "text.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_KERNEL_BUILDER(Name("PoseidonShard").Device(tensorflow::DEVICE_CPU), ShardKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonShardSize").Device(tensorflow::DEVICE_CPU), ShardSizeKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonReduceScatter").Device(tensorflow::DEVICE_CPU), ReduceScatterKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonGatherShards").Device(tensorflow::DEVICE_CPU), GatherShardsKernel);

}  // namespace

ShardAttributes::ShardAttributes(OpKernelConstruction* context) {
  std::string path;
  OP_REQUIRES_OK(context, context->GetAttr("layout", &path));
  OP_REQUIRES_OK(context, context->GetAttr("owner", &layout_.owner));
  layout_.first = static_cast<uint32_t>(Hash(path));
}

std::optional<ShardAttributes::Own> ShardAttributes::OwnOf(OpKernelContext* context, const tensorflow::OpKernel& op,
                                                           const std::string& site, int64_t elements,
                                                           tensorflow::DataType dtype) const {
  const Communicator* const communicator = CommunicatorOf(context, op, site);
  if (!communicator) return std::nullopt;
  if (layout_.owner >= communicator->size()) {
    context->SetStatus(absl::InvalidArgumentError(
        absl::StrCat(op.type_string(), " '", op.name(), "' has owner ", layout_.owner, ", expected -1 or a rank of ",
                     communicator->size(), "; give each variable an owner of this job.")));
    return std::nullopt;
  }
  const size_t element_bytes = tensorflow::DataTypeSize(dtype);
  const KvPairs pairs = communicator->Shards(layout_, elements, element_bytes);
  Own own = {};
  for (size_t i = 0; i < pairs.size(); ++i) {
    const KvPair pair = pairs[i];
    if (pair.server != communicator->rank()) continue;
    own.pairs.push_back(pair);
    own.elements += static_cast<int64_t>(pair.bytes / element_bytes);
  }
  return own;
}

ShardSizeKernel::ShardSizeKernel(OpKernelConstruction* context) : OpKernel(context), attributes_(context) {
  OP_REQUIRES_OK(context, context->GetAttr("elements", &elements_));
}

void ShardSizeKernel::Compute(OpKernelContext* context) {
  const auto own = attributes_.OwnOf(context, *this, "", elements_, tensorflow::DT_FLOAT);  // of any type as many
  if (!own) return;
  Tensor* size = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &size));
  size->scalar<int64_t>()() = own->elements;
}

void ShardKernel::Compute(OpKernelContext* context) {
  const Tensor& tensor = context->input(0);
  const auto own = attributes_.OwnOf(context, *this, "", tensor.NumElements(), tensor.dtype());
  if (!own) return;
  Tensor* shard = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({own->elements}), &shard));
  std::vector<size_t> places = {0};  // in the shard
  for (const KvPair& pair : own->pairs) places.push_back(places.back() + pair.bytes);
  const char* const from = static_cast<const char*>(tensor.data());
  char* const to = static_cast<char*>(shard->data());
  if (const std::shared_ptr<OnDevice> place = Place(context)) {
    for (size_t i = 0; i < own->pairs.size(); ++i) {
      const KvPair& pair = own->pairs[i];
      place->device->Copy(place->stream, to + places[i], from + pair.offset, pair.bytes);
    }
    return context->SetStatus(FailureOf(*place->device));
  }
  auto* const threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  ForBlocks(threads, static_cast<int64_t>(own->pairs.size()), /*block_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + places[i], from + own->pairs[i].offset, own->pairs[i].bytes);
    }
  });
}

ReduceScatterKernel::ReduceScatterKernel(OpKernelConstruction* context)
    : SyncKernel(context, "scatter"), attributes_(context) {
  const tensorflow::DataType given = context->input_type(0), sum = context->output_type(0);
  const bool is_half = given == tensorflow::DT_HALF || given == tensorflow::DT_BFLOAT16;
  OP_REQUIRES(context, sum == given || (is_half && sum == tensorflow::DT_FLOAT),
              absl::InvalidArgumentError(absl::StrCat("'", site_, "' sums a gradient of type ", DataTypeString(given),
                                                      " as ", DataTypeString(sum),
                                                      ", expected its own type, or float for half and bfloat16.")));
}

void ReduceScatterKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  Tensor wire, shard;
  OP_REQUIRES_OK_ASYNC(context, Narrow(context, &wire), done);
  const tensorflow::DataType sum = is_narrowed_ ? wire.dtype() : output_type(0);
  const auto own = attributes_.OwnOf(context, *this, site_, wire.NumElements(), sum);
  if (!own) return done();
  OP_REQUIRES_OK_ASYNC(context, context->allocate_temp(sum, TensorShape({own->elements}), &shard), done);
  Exchange exchange = ToExchange(context, wire);
  exchange.dtype = ToDataType(sum);
  if (sum != wire.dtype()) exchange.input_dtype = ToDataType(wire.dtype());
  exchange.ways = Ways::kUp;
  exchange.shards = attributes_.layout();
  Run(context, std::move(exchange), wire, shard, Widening(context, shard, done), done);
}

GatherShardsKernel::GatherShardsKernel(OpKernelConstruction* context)
    : ExchangeKernel(context), attributes_(context), shown_(ShownAs(context, "shards", {"shards"})) {
  OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
}

void GatherShardsKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const Tensor& shard = context->input(0);
  const auto own = attributes_.OwnOf(context, *this, site_, shape_.num_elements(), shard.dtype());
  if (!own) return done();
  OP_REQUIRES_ASYNC(
      context, shard.NumElements() == own->elements,
      absl::InvalidArgumentError(absl::StrCat(
          "'", site_, "' gathers a shard of ", shard.NumElements(), " elements, expected ", own->elements,
          " of a tensor of shape ", shape_.DebugString(),
          "; give it what PoseidonShard or PoseidonReduceScatter returns with the same layout and owner.")),
      done);
  Tensor* tensor = nullptr;
  OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape_, &tensor), done);
  Exchange exchange;
  exchange.dtype = ToMovedDataType(shard.dtype());
  exchange.count = shape_.num_elements();
  exchange.ways = Ways::kDown;
  exchange.shards = attributes_.layout();
  exchange.row = shown_.row;
  exchange.is_blocking = shown_.is_blocking;
  Run(context, std::move(exchange), shard, *tensor, done, done);
}

}  // namespace poseidon
