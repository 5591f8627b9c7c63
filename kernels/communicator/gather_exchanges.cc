// Gives all ranks the factors of all: sends this rank's, collects and passes on those of others, and falls back to
// the dense gradient when not all ranks have factors of the same form.
//
// Tests: tests/native/gather_exchanges_test.cc, tests/communicator/test_factors.py.

#include "gather_exchanges.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <sstream>
#include <utility>

#include "text.h"

namespace poseidon {

void GatheredFactors::Rows::CopyTo(char* to) const {
  if (element_bytes > 0) {
    PutBackZeros(data, element_bytes, to);
  } else if (bytes > 0) {
    std::memcpy(to, data, bytes);
  }
}

std::string GatherExchanges::Start(Factors factors, FactorsDone done, uint64_t site, uint64_t form,
                                   SiteStatistics& statistics, Clock::time_point submitted, Staging* staging) {
  Site& state_of_site = sites_[site];
  state_of_site.name = factors.site;
  state_of_site.priority = factors.priority;
  state_of_site.form = static_cast<DenseForm>(form ^ (form >> 32)) | 1;
  if (!state_of_site.is_tried) {
    done("", {});
    return "";
  }
  const Key key{site, state_of_site.step};
  State& state = states_[key];
  if (state.own) {
    done("'" + factors.site + "' is already being exchanged: one site cannot be in flight twice.", {});
    return "";
  }
  auto own = std::make_shared<Own>();
  own->factors = std::move(factors);
  own->done = std::move(done);
  own->form = form;
  own->statistics = &statistics;
  own->start = submitted;
  own->staging = staging;
  state.own = own;
  state.times.Arrived(transport_->rank(), Clock::now());
  ++num_active_;
  std::string disagreement = CheckArrivals(state);
  if (!disagreement.empty()) return disagreement;
  if (state.refused_by < 0) {
    for (size_t part = 0; part < own->factors.parts.size() && !has_failed_; ++part) SendPart(key, own, part);
  }
  FinishIfOver(key);
  return "";
}

// Sends a part of this rank's factors to all that get it from this rank.
void GatherExchanges::SendPart(const Key& key, const std::shared_ptr<Own>& own, size_t part) {
  const FactorPart& factor = own->factors.parts[part];
  if (!factor.columns.empty()) return SendColumns(key, own, part);
  std::vector<int> linked, others;
  for (int peer : routes_->Receivers()) {
    const bool is_linked =
        IsOnGpu(*own, part) && factor.row_bytes <= piece_bytes_ && links_->MaySend(peer, factor.bytes);
    (is_linked ? linked : others).push_back(peer);
  }
  if (!linked.empty()) SendByLink(key, own, part, linked);
  if (others.empty()) return;
  if (IsOnGpu(*own, part) && factor.bytes > 0) {
    FetchAndSend(key, own, part, others);
  } else {
    Send(key, own, part, others);
  }
}

FrameHeader GatherExchanges::HeaderOf(const Key& key, const Own& own, size_t part) const {
  const FactorPart& factor = own.factors.parts[part];
  FrameHeader header = {};
  header.kind = FrameKind::kFactors;
  header.traffic = Traffic::kGather;
  header.root = transport_->rank();
  header.site = key.first;
  header.step = key.second;
  header.count = own.form;
  header.offset = factor.row_bytes;
  header.length = factor.sent_bytes();
  header.dtype = factor.without_zeros ? static_cast<uint8_t>(factor.element_bytes) : 0;
  header.detail = static_cast<uint32_t>(part);
  return header;
}

void GatherExchanges::Send(const Key& key, const std::shared_ptr<Own>& own, size_t part,
                           const std::vector<int>& peers) {
  const FrameHeader header = HeaderOf(key, *own, part);
  for (int peer : peers) SendOne(key, own, peer, header, own->factors.parts[part].sent_data());
}

// Sends each rank its columns of a divided part, beginning with the next one.
void GatherExchanges::SendColumns(const Key& key, const std::shared_ptr<Own>& own, size_t part) {
  FrameHeader header = HeaderOf(key, *own, part);
  header.kind = FrameKind::kColumns;
  for (int distance = 1; distance < routes_->workers(); ++distance) {
    const int peer = (transport_->rank() + distance) % routes_->workers();
    const FactorPart::Columns& columns = own->factors.parts[part].columns[peer];
    header.offset = columns.row_bytes;
    header.length = columns.bytes;
    SendOne(key, own, peer, header, columns.data);
  }
}

void GatherExchanges::SendOne(const Key& key, const std::shared_ptr<Own>& own, int peer, const FrameHeader& header,
                              const void* data) {
  own->statistics->sent_bytes += header.length;
  if (!routes_->IsLocal(peer)) own->statistics->network_bytes += header.length;
  const bool is_bulk = sender_->Send(peer, header, data, [this, key, own] { HasLeft(key, own); });
  if (is_bulk) ++own->pending;
}

// The same from a GPU: in pieces, between which urgent KV pairs find their place.
void GatherExchanges::FetchAndSend(const Key& key, const std::shared_ptr<Own>& own, size_t part,
                                   const std::vector<int>& peers) {
  FactorPart& factor = own->factors.parts[part];
  factor.fetched = TakeMemory(factor.bytes, own->factors.site);
  if (!factor.fetched) return;
  auto missing = std::make_shared<size_t>((factor.bytes + piece_bytes_ - 1) / piece_bytes_);
  for (size_t begin = 0; begin < factor.bytes; begin += piece_bytes_) {
    ++own->pending;
    own->staging->FetchInto(factor.fetched,
                            {own->factors.site, own->factors.priority, static_cast<const char*>(factor.data) + begin,
                             std::min(piece_bytes_, factor.bytes - begin)},
                            begin, [this, key, own, part, peers, missing](const PinnedMemory& memory) {
                              if (!memory) return;
                              if (--*missing == 0) Send(key, own, part, peers);
                              HasLeft(key, own);
                            });
  }
}

// The same from this rank's window.
void GatherExchanges::SendByLink(const Key& key, const std::shared_ptr<Own>& own, size_t part,
                                 const std::vector<int>& peers) {
  const FactorPart& factor = own->factors.parts[part];
  FrameHeader header = HeaderOf(key, *own, part);
  header.kind = FrameKind::kGpuFactors;
  const size_t most = piece_bytes_ / factor.row_bytes * factor.row_bytes;
  own->statistics->sent_bytes += factor.bytes * peers.size();
  for (size_t begin = 0; begin < factor.bytes; begin += most) {
    header.length = std::min(most, factor.bytes - begin);
    header.sent_dtype = begin + header.length < factor.bytes;
    ++own->pending;
    links_->Send(ErrandOf(key.first), peers, header, static_cast<const char*>(factor.data) + begin,
                 [this, key, own] { HasLeft(key, own); });
  }
}

// One of the things that `own` waits for has happened.
void GatherExchanges::HasLeft(const Key& key, const std::shared_ptr<Own>& own) {
  --own->pending;
  FinishIfOver(key);
}

PinnedMemory GatherExchanges::TakeMemory(size_t bytes, const std::string& site) {
  PinnedMemory memory = allocate_(bytes);
  if (!memory) {
    fail_(Text("Rank ", transport_->rank(), " has no memory for ", bytes, " bytes of factors of '", site,
               "': train with smaller batches, or with policy='ps'."));
  }
  return memory;
}

GpuLinks::Errand GatherExchanges::ErrandOf(uint64_t site) {
  const Site& found = sites_[site];  // of the step before, if this rank has not come to this one
  return {found.name, found.priority};
}

std::string GatherExchanges::OnFactors(int peer, const FrameHeader& header, const char* payload) {
  const Key key{header.site, header.step};
  std::shared_ptr<char[]> data;
  if (header.is_in_window() && links_->MayGet(peer)) data = links_->TakeMemory(header.length);
  const bool is_on_gpu = data != nullptr;
  if (!data) data = allocate_(header.length);
  if (!data) {
    return Text("Rank ", header.root, " gives factors of ", header.length, " bytes, for which rank ",
                transport_->rank(), " has no memory: train with smaller batches, or with policy='ps'.");
  }
  auto arrival = std::make_shared<Arrival>();
  arrival->header = header;
  if (!IsOver(key)) {
    State& state = states_[key];
    const auto [found, is_first] = state.arrivals.emplace(std::make_pair(header.root, header.detail), arrival);
    if (!is_first && !found->second->IsContinuedBy(header)) return Twice(peer, header, "factors,");
    arrival = found->second;
    std::string disagreement = CheckArrivals(state);
    if (!disagreement.empty()) return disagreement;
  }
  const size_t index = arrival->rows.size();
  arrival->rows.push_back({data, data.get(), header.length, header.dtype, is_on_gpu});
  arrival->sent_bytes += header.length;
  arrival->is_announced = !header.is_in_window() || header.sent_dtype == 0;
  ++arrival->pending;
  ++num_passing_on_;
  auto take = [this, peer, key, arrival, index] {
    GatheredFactors::Rows& rows = arrival->rows[index];
    if (rows.element_bytes > 0) {
      const FrameHeader& header = arrival->header;
      const auto bytes = MatrixBytes(rows.data, header.length, header.dtype);
      if (!bytes || *bytes % header.offset != 0) {
        return fail_(Malformed(peer, Text("factors of rank ", header.root, " in ", header.length,
                                          " bytes that hold no rows of ", header.offset, " without their zeros")));
      }
      rows.bytes = *bytes;
    }
    --arrival->pending;
    if (auto found = states_.find(key); found != states_.end() && arrival->is_ready()) {
      found->second.times.Arrived(arrival->header.root, Clock::now());
    }
    PassOn(arrival);
    --num_passing_on_;
    FinishIfOver(key);
  };
  if (header.is_in_window()) {  // taken even if unused: the sender's window must not stay full
    const std::string wrong = links_->Take(ErrandOf(header.site), peer, header, data.get(), take);
    return wrong.empty() ? "" : Malformed(peer, wrong);
  }
  if (header.is_bulk()) {  // received even if unused: the sender waits until it has left
    transport_->ReceiveBulk(peer, header.tag, data.get(), header.length, take);
    return "";
  }
  if (header.length > 0) std::memcpy(data.get(), payload, header.length);
  take();
  return "";
}

// Factors that are unused here are passed on too: they tell the others to send the dense gradient as well.
void GatherExchanges::PassOn(const std::shared_ptr<Arrival>& arrival) {
  if (has_failed_) return;
  for (int peer : PassesOnTo(arrival->header)) {
    const bool is_bulk =
        sender_->Send(peer, arrival->header, arrival->rows[0].data, [this, arrival] { --num_passing_on_; });
    if (is_bulk) ++num_passing_on_;
  }
}

std::vector<int> GatherExchanges::PassesOnTo(const FrameHeader& header) const {
  return header.kind == FrameKind::kColumns ? std::vector<int>() : routes_->PassesOnTo(header.root);
}

std::string GatherExchanges::CheckArrivals(const State& state) const {
  if (!state.own) return "";
  const Factors& mine = state.own->factors;
  for (const auto& [from, arrival] : state.arrivals) {
    const FrameHeader& theirs = arrival->header;
    if (theirs.count != state.own->form) continue;  // no part of a sum, see OtherForm
    const bool is_known = theirs.detail < mine.parts.size();
    const size_t row_bytes = is_known ? mine.parts[theirs.detail].row_bytes : 0;
    if (is_known && theirs.offset == row_bytes) continue;
    std::ostringstream text;
    text << "Ranks disagree about the rows of '" << mine.site << "': rank " << from.first << " sends rows of "
         << theirs.offset << " bytes as part " << theirs.detail << ", rank " << transport_->rank() << " of "
         << row_bytes << ". Build the same model on all ranks.";
    return text.str();
  }
  return "";
}

// Returns a rank whose form is not this rank's, or -1. If forms differ, every rank finds one.
int GatherExchanges::OtherForm(const State& state) const {
  for (const auto& [from, arrival] : state.arrivals) {
    if (arrival->header.count != state.own->form) return from.first;
  }
  return -1;
}

DenseForm GatherExchanges::StartDense(uint64_t site) {
  Site& state = sites_[site];
  if (state.is_tried && state.form == 0) {  // the others wait for factors
    FrameHeader header = {};
    header.kind = FrameKind::kRefusal;
    header.traffic = Traffic::kGather;
    header.site = site;
    header.step = state.step;
    for (int peer = 0; peer < routes_->workers(); ++peer) {
      if (peer != transport_->rank()) sender_->Send(peer, header, nullptr, [] {});
    }
  }
  states_.erase({site, state.step});  // what has arrived is unused
  ++state.step;
  return std::exchange(state.form, 0);
}

void GatherExchanges::FinishDense(uint64_t site, DenseForm common) { sites_[site].is_tried = common != 0; }

void GatherExchanges::OnRefusal(int peer, const FrameHeader& header) {
  const Key key{header.site, header.step};
  if (IsOver(key)) return;
  states_[key].refused_by = peer;
  FinishIfOver(key);
}

// Whether this rank has synchronised the site in that step already.
bool GatherExchanges::IsOver(const Key& key) { return key.second < sites_[key.first].step; }

std::vector<int> GatherExchanges::Missing(const State& state) const {
  std::vector<int> missing;
  for (int peer = 0; peer < routes_->workers(); ++peer) {
    if (peer == transport_->rank()) continue;
    for (size_t part = 0; part < state.own->factors.parts.size(); ++part) {
      auto found = state.arrivals.find({peer, part});
      if (found == state.arrivals.end() || !found->second->is_ready()) {
        missing.push_back(peer);
        break;
      }
      if (found->second->header.count != state.own->form) break;  // its other parts are unused
    }
  }
  return missing;
}

// Copies what is on the GPU to the host, where this rank's own part is there; returns whether there is anything.
bool GatherExchanges::MoveToHost(const Key& key, const State& state) {
  const std::shared_ptr<Own> own = state.own;
  bool has_any = false;
  for (const auto& [from, arrival] : state.arrivals) {
    if (from.second >= own->factors.parts.size() || IsOnGpu(*own, from.second)) continue;
    for (GatheredFactors::Rows& rows : arrival->rows) {
      if (!rows.is_on_gpu) continue;
      has_any = true;
      const PinnedMemory memory = TakeMemory(rows.bytes, own->factors.site);
      if (!memory) return true;
      ++own->pending;
      links_->Fetch(ErrandOf(key.first), rows.data, rows.bytes, memory.get(),
                    [this, key, own, on_gpu = rows.owner] { HasLeft(key, own); });
      rows = {memory, memory.get(), rows.bytes};
    }
  }
  return has_any;
}

void GatherExchanges::FinishIfOver(const Key& key) {
  auto found = states_.find(key);
  if (found == states_.end() || has_failed_) return;
  const std::shared_ptr<Own> own = found->second.own;
  if (!own || own->pending > 0) return;
  int refused_by = found->second.refused_by;
  if (refused_by < 0) {
    if (!Missing(found->second).empty()) return;
    refused_by = OtherForm(found->second);
    if (refused_by < 0 && MoveToHost(key, found->second)) return;
  }
  const State state = std::move(found->second);
  states_.erase(found);
  --num_active_;

  GatheredFactors gathered;
  gathered.is_complete = refused_by < 0;
  gathered.refused_by = refused_by;
  for (size_t part = 0; gathered.is_complete && part < own->factors.parts.size(); ++part) {
    std::vector<GatheredFactors::Rows>& rows = gathered.parts.emplace_back();
    size_t sent_bytes = 0;
    for (int rank = 0; rank < routes_->workers(); ++rank) {
      if (rank == transport_->rank()) {
        const FactorPart& mine = own->factors.parts[part];
        const bool is_on_gpu = IsOnGpu(*own, part);
        rows.push_back({nullptr, static_cast<const char*>(mine.data), mine.bytes, 0, is_on_gpu});
        sent_bytes += mine.sent_bytes();
      } else {
        const Arrival& arrival = *state.arrivals.at({rank, part});
        rows.insert(rows.end(), arrival.rows.begin(), arrival.rows.end());
        sent_bytes += arrival.sent_bytes;
        own->statistics->received_bytes += arrival.sent_bytes;
        own->statistics->sent_bytes += arrival.sent_bytes * PassesOnTo(arrival.header).size();
      }
    }
    if (own->factors.since) continue;  // no factors
    own->statistics->short_factor_bytes += sent_bytes;
    for (const GatheredFactors::Rows& each : rows) own->statistics->factor_bytes += each.bytes;
  }
  if (gathered.is_complete) {
    statistics_->Waited(state.times);
    Site& site = sites_[key.first];
    ++site.step;
    site.form = 0;
    if (!own->factors.is_first_half) {
      own->statistics->count += 1;
      own->statistics->nanoseconds +=
          std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - own->factors.since.value_or(own->start))
              .count();
    }
  }
  own->done("", std::move(gathered));
}

// Whether a rank's factors are here, or only to be copied from its window.
bool GatherExchanges::HasGiven(const State& state, int rank) const {
  for (uint32_t part = 0; part < state.own->factors.parts.size(); ++part) {
    const auto found = state.arrivals.find({rank, part});
    if (found == state.arrivals.end()) return false;
    const Arrival& arrival = *found->second;
    if (!arrival.is_ready() && !(arrival.is_announced && arrival.header.is_in_window())) return false;
  }
  return true;
}

std::optional<GatherExchanges::Overdue> GatherExchanges::FindOverdue(Clock::time_point now, double seconds) const {
  for (const auto& [key, state] : states_) {
    if (!state.own || Seconds(now - state.own->start) < seconds) continue;
    std::vector<int> missing = Missing(state), direct;
    if (links_->waits_for_gpu()) {  // what lies in windows is not missing
      missing.erase(std::remove_if(missing.begin(), missing.end(), [&](int rank) { return HasGiven(state, rank); }),
                    missing.end());
    }
    std::copy_if(missing.begin(), missing.end(), std::back_inserter(direct),
                 [this](int rank) { return routes_->IsDirect(rank); });
    if (!direct.empty()) return Overdue{state.own->factors.site, std::move(direct)};
    const Staging* const staging = state.own->staging;
    const bool waits_for_gpu = (staging && staging->is_waiting()) || links_->waits_for_gpu();
    if (missing.empty() && waits_for_gpu) return Overdue{state.own->factors.site, {}};
    if (Seconds(now - state.own->start) < (1 + kPatience) * seconds) continue;
    if (missing.empty()) {  // all have sent theirs; one of them does not receive ours
      for (int rank = 0; rank < routes_->workers(); ++rank) {
        if (rank != transport_->rank()) missing.push_back(rank);
      }
    }
    return Overdue{state.own->factors.site, std::move(missing)};
  }
  return std::nullopt;
}

std::optional<GatherExchanges::LeftBehind> GatherExchanges::FindLeftBehind(const std::vector<char>& has_left) const {
  for (const auto& [key, state] : states_) {
    if (!state.own || state.refused_by >= 0) continue;
    for (int peer = 0; peer < routes_->workers(); ++peer) {
      // Packets keep their order: factors that were not announced before the goodbye never will be. If others pass on
      // a rank's factors, they notice it.
      if (has_left[peer] && peer != transport_->rank() && routes_->IsDirect(peer) && !state.arrivals.count({peer, 0})) {
        return LeftBehind{peer, state.own->factors.site};
      }
    }
  }
  return std::nullopt;
}

void GatherExchanges::Fail(const std::string& reason) {
  has_failed_ = true;  // the states stay: the network may still write to their memory
  for (auto& [key, state] : states_) {
    if (state.own) state.own->done(reason, {});
  }
}

}  // namespace poseidon
