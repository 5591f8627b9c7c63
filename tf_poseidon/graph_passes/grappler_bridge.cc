// Hands training graphs that hold a gradient site to the passes, which are Python (grappler.py), and orders the sums of
// partitioned graphs, also in processes without passes.
//
// TensorFlow runs this optimizer on every function before it executes it first, twice, with all
// calls inlined. It ignores an optimizer that fails, so what goes wrong is for the Python side to
// say. H. Zhang et al. describe the graph that results in USENIX ATC 2017, section 4.

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/grappler/costs/graph_properties.h"
#include "tensorflow/core/grappler/grappler_item.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer.h"
#include "tensorflow/core/grappler/optimizers/custom_graph_optimizer_registry.h"

namespace poseidon {
namespace {

using tensorflow::AttrValue;
using tensorflow::GraphDef;
using tensorflow::NodeDef;
using tensorflow::grappler::Cluster;
using tensorflow::grappler::GraphProperties;
using tensorflow::grappler::GrapplerItem;
using tensorflow::grappler::PluginGraphOptimizerRegistry;

// Of a placeholder that is a variable: the shape of what it holds. Of one that is a table: of a key, and of a value.
constexpr char kHandleShapes[] = "_handle_shapes";
// Of which types these are.
constexpr char kHandleTypes[] = "_handle_dtypes";
// An op whose tables have single keys and values.
constexpr char kTable[] = "AnonymousMutableHashTable";
// On a marker that a pass has decided about, and left as it is.
constexpr char kDecided[] = "_poseidon_planned";

// Called with a serialized GraphDef; gives poseidon_set_rewritten the graph to take in its place,
// if any.
using Passes = void (*)(const char* graph, size_t bytes, void* rewritten);

std::atomic<Passes> passes{nullptr};
// The ops over which gradients are synchronised, as the passes know them. Never freed.
std::atomic<const std::set<std::string>*> marker_ops{nullptr};

const AttrValue* FindAttr(const NodeDef& node, const char* name) {
  auto found = node.attr().find(name);
  return found == node.attr().end() ? nullptr : &found->second;
}

bool IsUndecidedSite(const NodeDef& node, const std::set<std::string>& markers) {
  return markers.count(node.op()) > 0 && !FindAttr(node, kDecided);
}

// Returns the name of the node that an input names.
std::string NodeOf(const std::string& input) {
  const std::string tensor = input.substr(0, input.find(':'));
  return tensor[0] == '^' ? tensor.substr(1) : tensor;
}

// Whether a node fills a tensor with as many elements as the shape of another one says.
bool FillsShape(const NodeDef& node, const absl::flat_hash_map<std::string, const NodeDef*>& nodes) {
  if (node.op() != "Fill" || node.input().empty()) return false;
  const NodeDef* source = &node;
  do {
    auto found = nodes.find(NodeOf(source->input(0)));
    source = found == nodes.end() ? nullptr : found->second;
  } while (source && source->op() == "Identity" && !source->input().empty());
  return source && source->op() == "Shape";
}

// Makes constants of the shapes of scalars where tensors are filled by shapes. TensorFlow takes the value of such a
// shape for a scalar that it has never written, and then allocates as many elements as it finds there.
absl::Status FixShapesOfScalars(GrapplerItem* item) {
  absl::flat_hash_map<std::string, const NodeDef*> nodes;
  for (const NodeDef& node : item->graph.node()) nodes[node.name()] = &node;
  std::vector<int> fills;
  for (int i = 0; i < item->graph.node_size(); ++i) {
    if (FillsShape(item->graph.node(i), nodes)) fills.push_back(i);
  }
  if (fills.empty()) return absl::OkStatus();
  GrapplerItem without_fills(*item);
  for (int i : fills) {
    NodeDef& node = *without_fills.graph.mutable_node(i);
    const tensorflow::DataType dtype = FindAttr(node, "T") ? FindAttr(node, "T")->type() : tensorflow::DT_FLOAT;
    node.set_op("Placeholder");
    node.clear_input();
    node.clear_attr();
    (*node.mutable_attr())["dtype"].set_type(dtype);
    (*node.mutable_attr())["shape"].mutable_shape()->set_unknown_rank(true);
  }
  GraphProperties properties(without_fills);
  TF_RETURN_IF_ERROR(properties.InferStatically(/*assume_valid_feeds=*/true, /*aggressive_shape_inference=*/true,
                                                /*include_tensor_values=*/false));
  for (NodeDef& node : *item->graph.mutable_node()) {
    if (node.op() != "Shape") continue;
    const auto& inputs = properties.GetInputProperties(node.name());
    if (inputs.empty() || inputs[0].shape().unknown_rank() || inputs[0].shape().dim_size() > 0) continue;
    const AttrValue* type = FindAttr(node, "out_type");
    const tensorflow::DataType dtype = type ? type->type() : tensorflow::DT_INT32;
    const std::string source = absl::StrCat("^", NodeOf(node.input(0)));
    node.set_op("Const");
    node.set_input(0, source);
    node.clear_attr();
    (*node.mutable_attr())["dtype"].set_type(dtype);
    auto* value = (*node.mutable_attr())["value"].mutable_tensor();
    value->set_dtype(dtype);
    value->mutable_tensor_shape()->add_dim()->set_size(0);
  }
  return absl::OkStatus();
}

// Infers the shapes of all outputs; the graph may be changed for it.
absl::Status InferShapes(GrapplerItem* item, GraphProperties* properties) {
  TF_RETURN_IF_ERROR(FixShapesOfScalars(item));
  return properties->InferStatically(/*assume_valid_feeds=*/true, /*aggressive_shape_inference=*/true,
                                     /*include_tensor_values=*/false);
}

// Makes arguments of placeholders that say what they hold: TensorFlow looks at that only there. Tables are made: of an
// argument it takes one type.
void PlaceholdersToArguments(GraphDef* graph) {
  for (NodeDef& node : *graph->mutable_node()) {
    if (node.op() != "Placeholder" || !FindAttr(node, kHandleShapes)) continue;
    auto& attributes = *node.mutable_attr();
    const AttrValue* types = FindAttr(node, kHandleTypes);
    if (types && types->list().type_size() == 2) {
      const tensorflow::DataType key = types->list().type(0), value = types->list().type(1);
      node.set_op(kTable);
      attributes["key_dtype"].set_type(key);
      attributes["value_dtype"].set_type(value);
      attributes.erase("dtype");
      continue;
    }
    node.set_op("_Arg");
    attributes["T"].set_type(attributes["dtype"].type());
    attributes["index"].set_i(0);
    attributes.erase("dtype");
  }
}

// Writes the default of an attribute without which TensorFlow cannot tell a node's inputs apart; files may lack it.
void FillNumberOfParts(GraphDef* graph) {
  for (NodeDef& node : *graph->mutable_node()) {
    if ((node.op() == "PoseidonRows" || node.op() == "PoseidonPart") && !FindAttr(node, "M")) {
      (*node.mutable_attr())["M"].set_i(0);
    }
  }
}

void ArgumentsToPlaceholders(GraphDef* graph) {
  for (NodeDef& node : *graph->mutable_node()) {
    if ((node.op() != "_Arg" && node.op() != kTable) || !FindAttr(node, kHandleShapes)) continue;
    auto& attributes = *node.mutable_attr();
    if (node.op() == kTable) {
      node.set_op("Placeholder");
      attributes["dtype"].set_type(tensorflow::DT_RESOURCE);
      attributes.erase("key_dtype");
      attributes.erase("value_dtype");
      continue;
    }
    node.set_op("Placeholder");
    attributes["dtype"].set_type(attributes["T"].type());
    attributes.erase("T");
    attributes.erase("index");
  }
}

// Called with bytes that are the result.
using Take = void (*)(const char* data, size_t bytes);

// Calls `take` with the graph and its shapes; returns false where TensorFlow refuses the graph.
bool AddShapes(const char* graph, size_t bytes, Take take) {
  GrapplerItem item;
  if (!item.graph.ParseFromArray(graph, bytes)) return false;
  PlaceholdersToArguments(&item.graph);
  FillNumberOfParts(&item.graph);
  GraphProperties properties(item);
  GraphDef result;
  if (!InferShapes(&item, &properties).ok() || !properties.AnnotateOutputShapes(&result).ok()) return false;
  ArgumentsToPlaceholders(&result);
  const std::string serialized = result.SerializeAsString();
  take(serialized.data(), serialized.size());
  return true;
}

// Calls `take` with the shapes alone, which are a small part of the graph. They are int64 numbers: of each node, in the
// order of the graph, how many outputs it has, and of each of these the rank and the sizes; -1 is what is unknown.
bool InferTable(const char* graph, size_t bytes, Take take) {
  GrapplerItem item;
  if (!item.graph.ParseFromArray(graph, bytes)) return false;
  PlaceholdersToArguments(&item.graph);
  FillNumberOfParts(&item.graph);
  GraphProperties properties(item);
  if (!InferShapes(&item, &properties).ok()) return false;
  std::vector<int64_t> table;
  for (const NodeDef& node : item.graph.node()) {
    const auto& outputs = properties.GetOutputProperties(node.name());
    table.push_back(outputs.size());
    for (const auto& output : outputs) {
      const auto& shape = output.shape();
      table.push_back(shape.unknown_rank() ? -1 : shape.dim_size());
      for (const auto& dim : shape.dim()) table.push_back(std::max<int64_t>(dim.size(), -1));
    }
  }
  take(reinterpret_cast<const char*>(table.data()), table.size() * sizeof(int64_t));
  return true;
}

// Adds up one after the other what AddN nodes of three and more inputs add up: TensorFlow's kernel begins with
// whichever input it may overwrite, which depends on timing, and so ranks would get different bits. TensorFlow's
// optimizer makes such nodes of chains of additions. Lists are added by AddN alone, whose
// order for them does not depend on timing. Returns whether there were any.
bool OrderSums(GraphDef* graph) {
  std::vector<NodeDef> added;
  for (NodeDef& node : *graph->mutable_node()) {
    std::vector<std::string> terms, controls;
    for (const std::string& input : node.input()) (input[0] == '^' ? controls : terms).push_back(input);
    if (node.op() != "AddN" || terms.size() < 3 || node.attr().at("T").type() == tensorflow::DT_VARIANT) continue;
    std::string sum = terms[0];
    for (size_t i = 1; i + 1 < terms.size(); ++i) {
      NodeDef& part = added.emplace_back();
      part.set_name(absl::StrCat(node.name(), "/sum", i));
      part.set_op("AddV2");
      part.set_device(node.device());
      part.add_input(sum);
      part.add_input(terms[i]);
      (*part.mutable_attr())["T"] = node.attr().at("T");
      sum = part.name();
    }
    node.set_op("AddV2");
    node.mutable_attr()->erase("N");
    node.clear_input();
    node.add_input(sum);
    node.add_input(terms.back());
    for (const std::string& control : controls) node.add_input(control);
  }
  for (NodeDef& node : added) *graph->add_node() = std::move(node);
  return !added.empty();
}

class GrapplerBridge : public tensorflow::grappler::CustomGraphOptimizer {
 public:
  std::string name() const override { return "poseidon"; }
  bool UsesFunctionLibrary() const override { return false; }
  absl::Status Init(const tensorflow::RewriterConfig_CustomGraphOptimizer*) override { return absl::OkStatus(); }

  absl::Status Optimize(Cluster*, const GrapplerItem& item, GraphDef* optimized) override {
    Passes run = passes;
    const std::set<std::string>* markers = marker_ops;
    bool has_site = false, has_parts = false, has_rows = false, is_function = false;
    for (const NodeDef& node : item.graph.node()) {
      has_site = has_site || (run && markers && IsUndecidedSite(node, *markers));
      has_parts = has_parts || node.op() == "PoseidonPart";
      has_rows = has_rows || node.op() == "PoseidonRows";
      is_function = is_function || node.op() == "_Arg";
    }
    // Partitioned by rows, or a function that runs whole on every rank. (What is still to be partitioned is none.)
    const bool is_of_one_process = has_parts || (has_rows && is_function);
    GraphDef graph = item.graph;
    const bool is_ordered = is_of_one_process && OrderSums(&graph);
    if (!has_site) {
      if (!is_ordered) return absl::AbortedError("Nothing to do.");
      *optimized = std::move(graph);
      return absl::OkStatus();
    }

    std::string rewritten;
    const std::string serialized = item.graph.SerializeAsString();
    run(serialized.data(), serialized.size(), &rewritten);
    if (rewritten.empty()) {
      if (!is_ordered) return absl::AbortedError("Left as it is.");
      *optimized = std::move(graph);
      return absl::OkStatus();
    }
    if (!optimized->ParseFromString(rewritten)) {
      return absl::InternalError("The passes returned no graph.");
    }
    if (is_of_one_process) OrderSums(optimized);
    return absl::OkStatus();
  }
};

}  // namespace
}  // namespace poseidon

extern "C" {

// Lets `passes` rewrite all functions from now on that hold one of `markers`, names of ops with spaces
// between them. Without passes, sums of partitioned functions are ordered all the same. Returns false when
// another plug-in has the place.
__attribute__((visibility("default"))) bool poseidon_set_passes(poseidon::Passes passes, const char* markers) {
  static const bool is_registered = [] {
    const std::set<std::string> devices = {"CPU"};
    using Registry = poseidon::PluginGraphOptimizerRegistry;
    if (!Registry::CreateOptimizers(devices).empty()) return false;  // it would end the process
    tensorflow::grappler::ConfigList unchanged;
    Registry::RegisterPluginOptimizerOrDie([] { return new poseidon::GrapplerBridge; }, "CPU", unchanged);
    return true;
  }();
  std::istringstream names(markers);
  using Names = std::istream_iterator<std::string>;
  poseidon::marker_ops = new std::set<std::string>(Names(names), Names());
  poseidon::passes = passes;
  return is_registered;
}

__attribute__((visibility("default"))) void poseidon_set_rewritten(void* rewritten, const char* graph, size_t bytes) {
  static_cast<std::string*>(rewritten)->assign(graph, bytes);
}

// For graphs that TensorFlow has not handed to us: those of files.
__attribute__((visibility("default"))) bool poseidon_add_shapes(const char* graph, size_t bytes, poseidon::Take take) {
  return poseidon::AddShapes(graph, bytes, take);
}

__attribute__((visibility("default"))) bool poseidon_infer_shapes(const char* graph, size_t bytes,
                                                                  poseidon::Take take) {
  return poseidon::InferTable(graph, bytes, take);
}
}
