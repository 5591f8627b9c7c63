// The ops of shards: the elements of a tensor that one rank owns. An exchange of PoseidonSync is divided into its way
// up and its way down, so that each rank computes what it owns in between. On a way up, ranks may get the sums of
// their own rows, too.
//
// Tests: tests/communicator/test_shards.py.

#include "sync_shape.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status ShardShape(InferenceContext* c) {
  c->set_output(0, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

absl::Status ReduceScatterShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(SyncShape(c));
  return ShardShape(c);
}

absl::Status ColumnRangeShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status ReduceScatterRowsShape(InferenceContext* c) {
  ShapeHandle summand, counts, rows;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &summand));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &counts));
  TF_RETURN_IF_ERROR(c->ReplaceDim(summand, 0, c->UnknownDim(), &rows));
  c->set_output(0, rows);
  return absl::OkStatus();
}

absl::Status GatherShardsShape(InferenceContext* c) {
  tensorflow::TensorShape whole;
  ShapeHandle shard, shape;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &shard));
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &whole));
  TF_RETURN_IF_ERROR(c->MakeShapeFromTensorShape(whole, &shape));
  c->set_output(0, shape);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("PoseidonShard")
    .Input("tensor: T")
    .Output("shard: T")
    .Attr(
        "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32,"
        " uint64, bool}")
    .Attr("layout: string")
    .Attr("owner: int >= -1 = -1")
    .Attr("divided: int >= -1 = -1")
    .Attr("columns: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ShardShape)
    .Doc(R"doc(
Returns this rank's shard of a tensor. Stateful, since a saved graph runs in many jobs.

Tensors with the same number of elements and the same attributes have the same shards, whatever their types. Shards of
small tensors may be empty.

tensor: The whole tensor.
shard: The elements that this rank owns, [n].
layout: The path of the variable: it chooses which servers own which elements.
owner: The rank that owns all elements; -1 spreads them over the servers.
divided: The dimension of a matrix of which each server owns a range, as of the factors of scheme "hfb", whatever the
  layout: 0 for rows, 1 for columns; the shard is this part, row by row. -1 if the servers own KV pairs.
columns: The columns of this matrix, whose elements the tensor has in any shape.
)doc");

REGISTER_OP("PoseidonShardSize")
    .Output("size: int64")
    .Attr("layout: string")
    .Attr("owner: int >= -1 = -1")
    .Attr("divided: int >= -1 = -1")
    .Attr("columns: int >= 0 = 0")
    .Attr("elements: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns how many elements this rank's shard of a tensor has, without the tensor.

size: A scalar.
layout, owner, divided, columns: Same as in PoseidonShard.
elements: The number of elements of the tensor.
)doc");

REGISTER_OP("PoseidonColumnRange")
    .Output("begin: int64")
    .Output("count: int64")
    .Attr("columns: int >= 0")
    .SetIsStateful()
    .SetShapeFn(ColumnRangeShape)
    .Doc(R"doc(
Says which columns of some this rank owns, as of a matrix that PoseidonShard divides.

begin: The first one, a scalar.
count: How many, a scalar; 0 if there are too few for all ranks.
columns: The number of columns of all ranks.
)doc");

REGISTER_OP("PoseidonReduceScatter")
    .Input("gradient: T")
    .Input("contributes: bool")
    .Output("shard: Tout")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("Tout: {half, bfloat16, float, double, int32, int64}")
    .Attr("site: string")
    .Attr("layout: string")
    .Attr("owner: int >= -1 = -1")
    .Attr("shape: shape = { unknown_rank: true }")
    .Attr("wire_dtype: {'', 'bfloat16'} = ''")
    .Attr("eager: bool = false")
    .Attr("priority: int = 0")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ReduceScatterShape)
    .Doc(R"doc(
Sums a gradient over all ranks and returns this rank's shard of the sum: the way up of PoseidonSync, with its bits.

gradient, contributes, site, shape, wire_dtype, eager, priority: Same as in PoseidonSync.
group, group_size: Same as in PoseidonSend.
shard: Of the sum, [n].
Tout: T, or float for half and bfloat16: then the sum is not rounded. Each rank decides for itself whether its gradient
  travels in two bytes: others may send it as float.
layout, owner: Same as in PoseidonShard.
)doc");

REGISTER_OP("PoseidonReduceScatterRows")
    .Input("summand: T")
    .Input("counts: int64")
    .Output("rows: T")
    .Attr("T: {half, bfloat16, float, double, int32, int64}")
    .Attr("site: string")
    .Attr("priority: int = 0")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ReduceScatterRowsShape)
    .Doc(R"doc(
Sums a tensor with the rows of all ranks over all ranks, and returns the sum of this rank's own rows.

Elements are added in the order of PoseidonSync. A rank without rows gets a padding row of zeros, as in PoseidonPart,
unless no rank has rows.

summand: [n, ...], of the same shape on all ranks: for each row of the batch as many elements of dimension 0, one or
  more, and the rows of the ranks one after the other.
counts: [ranks], the same on all ranks: how many rows of the batch each rank has.
rows: This rank's part of dimension 0 of the sum.
site: A name that is the same on all ranks and not in flight twice.
priority: Same as in PoseidonSync.
group, group_size: Same as in PoseidonSend.
)doc");

REGISTER_OP("PoseidonGatherShards")
    .Input("shard: T")
    .Output("tensor: T")
    .Attr(
        "T: {half, bfloat16, float, double, int8, int16, int32, int64, uint8, uint16, uint32,"
        " uint64, bool}")
    .Attr("site: string")
    .Attr("layout: string")
    .Attr("owner: int >= -1 = -1")
    .Attr("divided: int >= -1 = -1")
    .Attr("columns: int >= 0 = 0")
    .Attr("shape: shape")
    .Attr("priority: int = 0")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(GatherShardsShape)
    .Doc(R"doc(
Gives every rank the tensor of which all ranks have shards: the way down of PoseidonSync.

shard: This rank's shard of the tensor, [n].
tensor: The whole tensor, with the same bits on all ranks.
site: A name that is the same on all ranks and not in flight twice.
layout, owner, divided, columns: Same as in PoseidonShard. A matrix that is divided is joined on the host.
shape: The tensor's shape.
priority: Same as in PoseidonSync.
group, group_size: Same as in PoseidonSend.
)doc");

}  // namespace poseidon
