// Compares a frame's numbers with how this job cuts tensors, and with the ways that its messages take.
//
// Tests: tests/native/protocol_test.cc, tests/native/fuzz_test.cc.

#include "frame_checks.h"

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "gpu_links.h"
#include "kv_pairs.h"
#include "sum.h"
#include "text.h"

namespace poseidon {

std::string FrameChecks::Wrong(int peer, const FrameHeader& header) const {
  switch (header.kind) {
    case FrameKind::kContribution:
    case FrameKind::kResult:
    case FrameKind::kGpuContribution:
    case FrameKind::kGpuResult:
      return WrongKvPair(peer, header);
    case FrameKind::kWindow: {
      const size_t most = GpuLinks::MostBytes(kv_pair_bytes_);
      if (header.count == 0 || header.count > most) {
        return Text("a window of ", header.count, " bytes, expected 1 to ", most);
      }
      return header.length > 0 && header.length <= Device::kHandleBytes
                 ? ""
                 : Text("a handle of ", header.length, " bytes, expected 1 to ", Device::kHandleBytes);
    }
    case FrameKind::kWindowOpen:
    case FrameKind::kTaken:
      return header.length == 0 ? "" : Text("word of a window with ", header.length, " bytes, expected none");
    case FrameKind::kFactors:
    case FrameKind::kColumns:
    case FrameKind::kGpuFactors:
      return WrongFactors(peer, header);
    case FrameKind::kRefusal:
      return header.length == 0 ? "" : Text("a refusal of ", header.length, " bytes, expected none");
    case FrameKind::kPing:
      return header.length <= kMaxPingBytes
                 ? ""
                 : Text("a ping of ", header.length, " bytes, expected at most ", kMaxPingBytes);
    case FrameKind::kPong:
      return header.length == 0 ? "" : Text("an answer of ", header.length, " bytes to a ping, expected none");
    case FrameKind::kQuestion:
      return header.is_bulk() ? Text("a question of ", header.length, " bytes, expected at most ", kInlineBytes) : "";
    case FrameKind::kAnswer:
      return header.detail == 0 || (header.detail == 1 && !header.is_bulk())
                 ? ""
                 : Text("an answer of ", header.length, " bytes with detail ", header.detail,
                        ", expected 0, or 1 for a reason of at most ", kInlineBytes, " bytes");
    default:
      return Text("a frame of kind ", static_cast<int>(header.kind), ", expected one of this version");
  }
}

std::string FrameChecks::WrongKvPair(int peer, const FrameHeader& header) const {
  const bool is_scatter = header.traffic == Traffic::kScatter, is_of_shards = header.is_of_shards();
  const bool is_sum = header.traffic == Traffic::kSum || is_scatter, is_result = header.is_result();
  const auto dtype = static_cast<DataType>(header.dtype);
  if (dtype > DataType::kBytes || (is_sum && dtype == DataType::kBytes)) {
    return Text("element type ", int{header.dtype}, ", expected 0 to ", static_cast<int>(DataType::kBytes) - is_sum);
  }
  const bool may_be_none = is_sum || is_of_shards, may_be_rank = !is_sum || is_of_shards;
  const bool is_root = (may_be_none && header.root == -1) || (may_be_rank && header.root >= 0 && header.root < size_);
  if (!is_root || (!is_sum && !is_of_shards && header.traffic != Traffic::kBroadcast)) {
    return Text("a KV pair of traffic ", static_cast<int>(header.traffic), " and root ", header.root,
                ", expected a sum of root -1 or a broadcast of root 0 to ", size_ - 1, ", or shards of one of them");
  }
  if (is_of_shards && is_result == is_scatter) {
    return Text(is_result ? "a result" : "a part", " of traffic ", static_cast<int>(header.traffic),
                ", expected one of the way that it takes");
  }
  const auto sent_dtype = static_cast<DataType>(header.sent_dtype);
  if (sent_dtype != dtype && (!is_sum || is_result || !CanBeSummand(sent_dtype, dtype))) {
    return Text(is_result ? "a result" : "a part", " of element type ", int{header.sent_dtype}, ", expected ",
                int{header.dtype}, " or, of a sum of floats, a half or bfloat16");
  }
  if (header.count > SIZE_MAX / std::max(ElementBytes(dtype), sizeof(float))) {
    return Text(header.count, " elements of ", Name(dtype), ", expected as many as have an address");
  }
  const size_t bytes = header.count * ElementBytes(dtype);
  const ShardLayout layout{header.detail, header.root};
  const KvPairs pairs = is_of_shards
                            ? KvPairs(layout, header.count, ElementBytes(dtype), kv_pair_bytes_, shard_servers_)
                            : KvPairs(header.site, bytes, kv_pair_bytes_, servers_);
  const size_t index = header.offset < bytes ? pairs.IndexOf(header.offset) : 0;
  if (header.offset >= bytes || pairs[index].offset != header.offset) {
    return Text("a KV pair at byte ", header.offset, " of ", bytes, ", expected where one begins");
  }
  const KvPair pair = pairs[index];
  if (header.is_in_window() && !(header.traffic == Traffic::kSum && routes_->IsLocal(peer))) {
    return "a KV pair in a window, expected those of sums, of ranks that combine with this one";
  }
  const bool may_be_empty = is_sum && !is_result && !header.is_in_window();
  const size_t length = pair.bytes / ElementBytes(dtype) * ElementBytes(sent_dtype);
  if (header.length != length && !(may_be_empty && header.length == 0)) {
    return Text("a KV pair of ", header.length, " bytes, expected ", length, may_be_empty ? " or none" : "");
  }
  bool is_way = peer == routes_->Up(pair.server) && (is_of_shards || header.root != rank_) && !routes_->only_serves();
  if (!is_result && is_sum) {
    const std::vector<int>& sources = routes_->Sources(pair.server);
    is_way = std::count(sources.begin(), sources.end(), peer) > 0;
  } else if (!is_result) {
    is_way = peer == routes_->SourceOf(header.root, pair.server);
  }
  if (!is_way) {
    return Text(is_result ? "a result" : "a part", " of a KV pair of server ", pair.server,
                ", expected from those alone that the nodes of the ranks let send it");
  }
  return "";
}

std::string FrameChecks::WrongFactors(int peer, const FrameHeader& header) const {
  const bool is_rank = header.root >= 0 && header.root < size_ && header.root != rank_;
  const bool is_direct = header.kind == FrameKind::kColumns;
  if (!is_rank || peer != (is_direct ? header.root : routes_->GiverOf(header.root)) || routes_->only_serves()) {
    return Text("factors of rank ", header.root, ", expected those of another one of ", size_,
                " ranks from whom the nodes of the ranks let send them");
  }
  if (header.is_in_window() && !(routes_->IsLocal(header.root) && header.dtype == 0 && header.sent_dtype <= 1 &&
                                 header.length > 0 && header.length <= kv_pair_bytes_)) {
    return Text("factors of rank ", header.root, " in a window: ", header.length, " bytes, dtype ", int{header.dtype},
                ", sent_dtype ", int{header.sent_dtype}, "; expected 1 to ", kv_pair_bytes_,
                " bytes, 0, and 0 or 1, of a rank that combines with this one");
  }
  if (header.dtype != 0) {
    const bool has_elements = header.dtype == 2 || header.dtype == 4 || header.dtype == 8;
    if (has_elements && header.offset > 0 && header.offset % header.dtype == 0) return "";
    return Text("factors in rows of ", header.offset, " bytes, with elements of ", int{header.dtype},
                ", expected whole elements of 2, 4 or 8");
  }
  if (header.offset == 0 ? header.length > 0 : header.length % header.offset != 0) {
    return Text("factors of ", header.length, " bytes in rows of ", header.offset, ", expected whole rows");
  }
  return "";
}

}  // namespace poseidon
