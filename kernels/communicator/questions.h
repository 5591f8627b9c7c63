// Questions that one rank's program asks another's, whatever else both of them do meanwhile: a short text goes there,
// and bytes come back. What they mean is the programs' affair.

#ifndef POSEIDON_COMMUNICATOR_QUESTIONS_H_
#define POSEIDON_COMMUNICATOR_QUESTIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "exchange.h"
#include "frame.h"
#include "sender.h"
#include "statistics.h"
#include "transport.h"

namespace poseidon {

// What `peer` asks; it knows the question by its number.
struct Question {
  int peer;
  uint64_t number;
  std::string text;
};

class Questions {
 public:
  // `on_question` is told what others ask. It must not block; the answer may come at any time, from `Reply`.
  Questions(Transport* transport, Sender* sender, std::function<void(Question)> on_question)
      : transport_(transport), sender_(sender), on_question_(std::move(on_question)) {}

  // Asks `peer`, another rank. Its answer has `bytes` bytes, which come to `answer`: that must stay valid until `done`,
  // after an error for ever.
  void Ask(int peer, const std::string& text, void* answer, size_t bytes, Done done);

  // Answers a question of `peer`, with bytes or, as a refusal, the reason why there are none. A rank also does so when
  // it has said goodbye: who waits for an answer has not.
  void Reply(int peer, uint64_t number, std::string answer, bool is_refusal);

  void OnQuestion(int peer, const FrameHeader& header, const char* payload) {
    on_question_({peer, header.step, std::string(payload, header.length)});
  }

  // Takes an answer; says what is wrong with it, empty if nothing is.
  std::string OnAnswer(int peer, const FrameHeader& header, const char* payload);

  // A question that was not answered for `seconds`: the first line of its text, and who was asked.
  std::optional<std::pair<std::string, int>> FindOverdue(Clock::time_point now, double seconds) const;

  // Ends all questions with an error.
  void Fail(const std::string& reason);

  bool is_waiting() const { return !asked_.empty(); }

 private:
  struct Asked {
    int peer;
    std::string title;  // the first line of the text
    void* answer;
    size_t bytes;
    Clock::time_point start;
    Done done;
    bool is_arriving = false;  // the answer
  };

  void Finish(uint64_t number, const std::string& error);

  Transport* const transport_;
  Sender* const sender_;
  const std::function<void(Question)> on_question_;
  std::map<uint64_t, Asked> asked_;  // by number
  uint64_t next_ = 0;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_QUESTIONS_H_
