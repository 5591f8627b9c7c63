// What the kernels of shards do on any device, and those of the CPU.
//
// Tests: tests/communicator/test_shards.py.

#include "shard_kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "join_parts.h"
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

// Pieces of fewer bytes are copied several at once.
constexpr int64_t kCopiedBytes = 64 << 10;

REGISTER_KERNEL_BUILDER(Name("PoseidonShard").Device(tensorflow::DEVICE_CPU), ShardKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonShardSize").Device(tensorflow::DEVICE_CPU), ShardSizeKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonColumnRange").Device(tensorflow::DEVICE_CPU), ColumnRangeKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonReduceScatter").Device(tensorflow::DEVICE_CPU), ReduceScatterKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonReduceScatterRows").Device(tensorflow::DEVICE_CPU), ReduceScatterRowsKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonGatherShards").Device(tensorflow::DEVICE_CPU), GatherShardsKernel);

}  // namespace

ShardAttributes::ShardAttributes(OpKernelConstruction* context) {
  std::string path;
  OP_REQUIRES_OK(context, context->GetAttr("layout", &path));
  OP_REQUIRES_OK(context, context->GetAttr("owner", &layout_.owner));
  layout_.first = static_cast<uint32_t>(Hash(path));
  if (!context->HasAttr("divided")) return;
  OP_REQUIRES_OK(context, context->GetAttr("divided", &divided_));
  OP_REQUIRES_OK(context, context->GetAttr("columns", &columns_));
  OP_REQUIRES(context, divided_ < 0 || (divided_ <= 1 && columns_ > 0 && layout_.owner < 0),
              absl::InvalidArgumentError(absl::StrCat("'", path, "' divides dimension ", divided_, " of a matrix of ",
                                                      columns_, " columns of owner ", layout_.owner,
                                                      ", expected 0 or 1 of 1 column or more of owner -1.")));
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
  Own own;
  if (is_of_matrix()) {
    if (elements % columns_ != 0) {
      context->SetStatus(
          absl::InvalidArgumentError(absl::StrCat(op.type_string(), " '", op.name(), "' divides a tensor of ", elements,
                                                  " elements, expected a matrix of ", columns_, " columns.")));
      return std::nullopt;
    }
    const MatrixParts parts = PartsOf(*communicator, elements);
    const ColumnRange& range = parts.ranges[communicator->rank()];
    own.lines = parts.lines;
    own.elements = range.size() * parts.lines;
    own.pieces = {{communicator->rank(), range.begin * element_bytes, range.size() * element_bytes}};
    return own;
  }
  const KvPairs pairs = communicator->Shards(layout_, elements, element_bytes);
  for (size_t i = 0; i < pairs.size(); ++i) {
    const KvPair pair = pairs[i];
    if (pair.server != communicator->rank()) continue;
    own.pieces.push_back(pair);
    own.elements += static_cast<int64_t>(pair.bytes / element_bytes);
  }
  return own;
}

MatrixParts ShardAttributes::PartsOf(const Communicator& communicator, int64_t elements) const {
  return DivideMatrix(elements / columns_, columns_, divided_, communicator.size(), communicator.servers());
}

std::string ShardAttributes::form() const { return absl::StrCat("dimension ", divided_, " of ", columns_, " columns"); }

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

ColumnRangeKernel::ColumnRangeKernel(OpKernelConstruction* context) : OpKernel(context) {
  OP_REQUIRES_OK(context, context->GetAttr("columns", &columns_));
}

void ColumnRangeKernel::Compute(OpKernelContext* context) {
  const Communicator* const communicator = CommunicatorOf(context, *this, "");
  if (!communicator) return;
  const ColumnRange range =
      DivideColumns(columns_, communicator->size(), communicator->servers())[communicator->rank()];
  Tensor *begin = nullptr, *count = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &begin));
  OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &count));
  begin->scalar<int64_t>()() = range.begin;
  count->scalar<int64_t>()() = range.size();
}

void ShardKernel::Compute(OpKernelContext* context) {
  const Tensor& tensor = context->input(0);
  const auto own = attributes_.OwnOf(context, *this, "", tensor.NumElements(), tensor.dtype());
  if (!own) return;
  Tensor* shard = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({own->elements}), &shard));
  if (own->elements == 0) return;
  const auto num_pieces = static_cast<int64_t>(own->pieces.size());  // of a line
  std::vector<size_t> places = {0};                                  // in the line's part of the shard
  for (const KvPair& piece : own->pieces) places.push_back(places.back() + piece.bytes);
  const char* const from = static_cast<const char*>(tensor.data());
  char* const to = static_cast<char*>(shard->data());
  const size_t to_pitch = places.back(), from_pitch = tensor.TotalBytes() / own->lines;
  if (const std::shared_ptr<OnDevice> place = Place(context)) {
    for (int64_t i = 0; i < num_pieces; ++i) {
      place->device->CopyLines(place->stream, to + places[i], to_pitch, from + own->pieces[i].offset, from_pitch,
                               own->pieces[i].bytes, own->lines);
    }
    return context->SetStatus(FailureOf(*place->device));
  }
  auto* const threads = context->device()->tensorflow_cpu_worker_threads()->workers;
  const int64_t at_once = std::max<int64_t>(1, kCopiedBytes / static_cast<int64_t>(own->pieces[0].bytes));
  ForBlocks(threads, own->lines * num_pieces, at_once, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t line = i / num_pieces;
      const KvPair& piece = own->pieces[i % num_pieces];
      std::memcpy(to + line * to_pitch + places[i % num_pieces], from + line * from_pitch + piece.offset, piece.bytes);
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

ReduceScatterRowsKernel::ReduceScatterRowsKernel(OpKernelConstruction* context)
    : ExchangeKernel(context), shown_(ShownAs(context, "return", {"return"})) {}

absl::Status ReduceScatterRowsKernel::CountRows(const Tensor& summand, const Tensor& counts, int ranks,
                                                int64_t* total) const {
  if (summand.dims() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", site_, "' sums a scalar, expected a tensor with the rows of all ranks along dimension 0."));
  }
  if (counts.dims() != 1 || counts.dim_size(0) != ranks) {
    return absl::InvalidArgumentError(absl::StrCat("'", site_, "' has row counts of shape ",
                                                   counts.shape().DebugString(), ", expected [", ranks,
                                                   "], one of each rank."));
  }
  const int64_t size = summand.dim_size(0);
  bool are_counts = true;
  *total = 0;
  for (int rank = 0; rank < ranks && are_counts; ++rank) {
    const int64_t count = counts.vec<int64_t>()(rank);
    are_counts = count >= 0 && !__builtin_add_overflow(*total, count, total);
  }
  if (are_counts && (*total > 0 ? size % *total == 0 : size == 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", site_, "' sums a tensor of shape ", summand.shape().DebugString(),
                                                 " with row counts ", counts.SummarizeValue(ranks),
                                                 ", expected counts of 0 or more whose sum divides dimension 0."));
}

void ReduceScatterRowsKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const Communicator* const communicator = CommunicatorOf(context, *this, site_);
  if (!communicator) return done();
  const Tensor& summand = context->input(0);
  int64_t total;
  OP_REQUIRES_OK_ASYNC(context, CountRows(summand, context->input(1), communicator->size(), &total), done);
  const auto counts = context->input(1).vec<int64_t>();
  const int64_t own = counts(communicator->rank());
  const bool is_padding = own == 0 && total > 0;
  TensorShape shape = summand.shape();
  if (total > 0) shape.set_dim(0, shape.dim_size(0) / total * (is_padding ? 1 : own));
  Tensor* rows = nullptr;
  OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &rows), done);
  if (is_padding && rows->TotalBytes() > 0) std::memset(rows->data(), 0, rows->TotalBytes());
  Exchange exchange;
  exchange.dtype = ToDataType(summand.dtype());
  exchange.count = summand.NumElements();
  exchange.ways = Ways::kUp;
  for (int64_t i = 0; i < counts.size(); ++i) {
    exchange.ranges.push_back(total > 0 ? summand.NumElements() / total * counts(i) : 0);
  }
  exchange.row = shown_.row;
  exchange.is_blocking = shown_.is_blocking;
  Run(context, std::move(exchange), summand, *rows, done, done);
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
  if (attributes_.is_of_matrix()) return Join(context, std::move(done));
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

// The same of parts of a matrix, which lie in it in lines.
void GatherShardsKernel::Join(OpKernelContext* context, DoneCallback done) {
  OP_REQUIRES_ASYNC(context, !Place(context),
                    absl::UnimplementedError(absl::StrCat(
                        "'", site_, "' joins parts of a matrix on a GPU, expected the host: place the node there.")),
                    done);
  Communicator* const communicator = CommunicatorOf(context, *this, site_);
  const Tensor& shard = context->input(0);
  Factors factors;
  factors.site = site_;
  factors.form = absl::StrCat(DataTypeString(shard.dtype()), " by ", attributes_.form());
  factors.row = shown_.row;
  factors.is_blocking = shown_.is_blocking;
  factors.priority = priority_;
  factors.group = group_;
  JoinParts(context, communicator, std::move(factors), shard, attributes_.PartsOf(*communicator, shape_.num_elements()),
            shape_, std::move(done));
}

}  // namespace poseidon
