// The ops of a rewritten graph: a gradient leaves by PoseidonSend and comes back by PoseidonRecv.
//
// Tests: tests/graphs/test_passes.py, tests/graphs/test_placement.py.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status SendShape(InferenceContext* c) {
  ShapeHandle scalar;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 0, &scalar));
  c->set_output(0, c->Scalar());
  return absl::OkStatus();
}

absl::Status RecvShape(InferenceContext* c) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  for (int i = 0; i + 1 < c->num_outputs(); ++i) {
    ShapeHandle shape = c->UnknownShape();
    if (i < static_cast<int>(shapes.size())) {
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
    }
    c->set_output(i, shape);
  }
  c->set_output(c->num_outputs() - 1, c->Scalar());
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("PoseidonSend")
    .Input("tensors: T")
    .Input("contributes: bool")
    .Output("ticket: variant")
    .Attr("T: list(type) >= 1")
    .Attr("site: string")
    .Attr("scheme: {'ps', 'sfb', 'hfb'}")
    .Attr("form: string = ''")
    .Attr("strict: bool = false")
    .Attr("group: string = ''")
    .Attr("group_size: int >= 1 = 1")
    .Attr("priority: int = 0")
    .Attr("least_saving: float = 1.0")
    .Attr("float_sum: bool = false")
    .Attr("divided: int >= 0 = 0")
    .Attr("joins: bool = true")
    .Attr("clocked: bool = false")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(SendShape)
    .Doc(R"doc(
Starts to synchronise one site and returns at once: an exchange of all ranks, no message to one of them.

tensors: With scheme "ps" the gradient, of any shape. With "sfb" and "hfb" its factors U [K, M] and V [K, N],
  and whatever else travels with them, matrices all; K may differ between ranks.
contributes: A scalar. False leaves this rank out of the sum.
ticket: For PoseidonRecv.
site: The path of the variable, and which synchronisation of it within the step this is.
form: How this rank will use the factors; factors are exchanged only if all ranks have the same form.
strict: Whether to fail where ranks do not have the same factors.
scheme: "ps" sums over the sharded parameter server; "sfb" gives all ranks the factors of all; "hfb" does so too, but
  of the factor that is divided each server gets only its columns. PoseidonJoinColumns puts together what servers make of them.
group: If not empty, it waits a short while for the other exchanges of this group, and leaves with them.
group_size: The number of exchanges in the group, per step.
priority: Exchanges with smaller numbers overtake it on their way, at its next piece.
least_saving: A factor travels without its zeros if at least this share of its bytes is saved, which each rank finds
  out for itself; 1 for always as it is. Not among ranks of one node.
float_sum: Whether the sum of gradients in half or bfloat16 is a float, not rounded; only with "ps". Each rank decides
  for itself whether its gradient travels in two bytes: others may send it as float.
divided: With "hfb", which of the tensors is divided by columns: 0 for U, 1 for V.
clocked: With "ps", whether a rank may start the next exchange of this site before the last ones are over, where workers
  run ahead of the weights. All ranks then have a gradient, and none factors.
joins: With "hfb", whether a PoseidonJoinColumns ends the exchange; if not, PoseidonRecv does.
)doc");

REGISTER_OP("PoseidonRecv")
    .Input("ticket: variant")
    .Output("values: T")
    .Output("complete: bool")
    .Attr("T: list(type) >= 1")
    .Attr("shapes: list(shape) = []")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(RecvShape)
    .Doc(R"doc(
Completes when the exchange that PoseidonSend has started is complete; blocks no thread until then.

ticket: From PoseidonSend.
values: With scheme "ps", the sum over ranks. With "sfb" and "hfb", each tensor with the rows of all ranks, in
  rank order; of the one that is divided, this rank's columns, of which there may be none.
complete: False, on all ranks, when a rank could not give factors: then `values` have no rows, and the gradient must
  travel dense. Always true with "ps".
shapes: The shapes of `values`, as far as they are known.
)doc");

}  // namespace poseidon
