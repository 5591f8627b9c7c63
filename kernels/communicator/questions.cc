// Sends questions and their answers.
//
// Tests: tests/native/questions_test.cc, tests/communicator/test_communicator.py.

#include "questions.h"

#include <cstring>
#include <memory>

#include "text.h"

namespace poseidon {

void Questions::Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done) {
  FrameHeader header = {};
  header.kind = FrameKind::kQuestion;
  header.step = next_++;
  header.length = text.size();
  asked_.emplace(header.step,
                 Asked{peer, text.substr(0, text.find('\n')), answer, bytes, Clock::now(), std::move(done)});
  sender_->Send(peer, header, text.data(), [] {});
}

void Questions::Reply(int peer, uint64_t number, std::string answer, bool is_refusal) {
  const auto bytes = std::make_shared<const std::string>(std::move(answer));
  FrameHeader header = {};
  header.kind = FrameKind::kAnswer;
  header.step = number;
  header.length = bytes->size();
  header.detail = is_refusal;
  sender_->Send(peer, header, bytes->data(), [bytes] {});
}

std::string Questions::OnAnswer(int peer, const FrameHeader& header, const char* payload) {
  const auto found = asked_.find(header.step);
  if (found == asked_.end() || found->second.peer != peer || found->second.is_arriving) {
    return Malformed(peer, Text("an answer to question ", header.step, ", expected one that it was asked"));
  }
  Asked& asked = found->second;
  if (header.detail) {
    Finish(header.step, std::string(payload, header.length));
  } else if (header.length != asked.bytes) {
    return Malformed(peer,
                     Text("an answer of ", header.length, " bytes to '", asked.title, "', expected ", asked.bytes));
  } else if (header.is_bulk()) {
    asked.is_arriving = true;
    transport_->ReceiveBulk(peer, header.tag, asked.answer, asked.bytes,
                            [this, number = header.step] { Finish(number, ""); });
  } else {
    if (asked.bytes > 0) std::memcpy(asked.answer, payload, asked.bytes);
    Finish(header.step, "");
  }
  return "";
}

void Questions::Finish(uint64_t number, const std::string& error) {
  if (auto asked = asked_.extract(number)) asked.mapped().done(error);  // unless the job has failed before
}

std::optional<std::pair<std::string, int>> Questions::FindOverdue(Clock::time_point now, double seconds) const {
  for (const auto& [number, asked] : asked_) {
    if (Seconds(now - asked.start) > seconds) return std::pair{asked.title, asked.peer};
  }
  return std::nullopt;
}

void Questions::Fail(const std::string& reason) {
  for (auto& [number, asked] : std::exchange(asked_, {})) asked.done(reason);
}

}  // namespace poseidon
