// Holds back receives that could take the data of an earlier transfer with the same tag on the wire.

#ifndef POSEIDON_COMMUNICATOR_TAG_ORDER_H_
#define POSEIDON_COMMUNICATOR_TAG_ORDER_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace poseidon {

// The receives of one peer's transfers. Their tags count from 0; on the wire, only a tag modulo `period` is seen.
//
// Receives may be asked for out of order: a result waits until the input that it overwrites has left. If it waits so
// long that a transfer `period` tags later is asked for before it, that one would get its data. So a receive is started
// only when all those that are `period` or more tags before it have been.
template <typename Receive>
class TagOrder {
 public:
  explicit TagOrder(uint32_t period) : period_(period) {}

  // Adds the receive of transfer `tag`, and calls start(tag, receive) for those that may start now, in order.
  template <typename Start>
  void Add(uint32_t tag, Receive receive, const Start& start) {
    // Differences of tags, which may have run over.
    if (tag - first_missing_ >= period_) {
      held_.emplace(tag, std::move(receive));
      return;
    }
    start(tag, std::move(receive));
    started_.insert(tag);
    while (started_.erase(first_missing_) > 0) {
      // The one that is `period` tags after a transfer that was missing.
      auto next = held_.extract(first_missing_++ + period_);
      if (next.empty()) continue;
      start(next.key(), std::move(next.mapped()));
      started_.insert(next.key());
    }
  }

 private:
  uint32_t period_;
  uint32_t first_missing_ = 0;  // the first tag that was not started
  std::set<uint32_t> started_;  // after it
  std::map<uint32_t, Receive> held_;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_TAG_ORDER_H_
