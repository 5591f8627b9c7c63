// Questions: each has one answer, of the bytes that it asks for, also from a rank that has said goodbye.

#include "questions.h"

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "job.h"

using namespace poseidon;

namespace {

// Rank 0's question to rank 1 of 3, and the reason with which it ends.
struct Asking {
  explicit Asking(Options options = {}) {
    auto owned = std::make_unique<ScriptedTransport>(0, 3);
    transport = owned.get();
    rank = std::make_unique<Rank>(std::move(owned), options);
    rank->protocol->Ask(1, "title\nfields", answer, sizeof(answer), [this](const std::string& error) {
      reason = error;
      ++ends;
    });
    rank->protocol->Flush();
  }

  void Take(FrameHeader header, const std::string& payload = "", int peer = 1) {
    header.layout = transport->sent.back().header.layout;  // of its own question
    transport->Arrive(peer, Packet(header, payload));
    rank->protocol->Poll();
  }

  char answer[3] = {};
  ScriptedTransport* transport;
  std::unique_ptr<Rank> rank;
  std::string reason = "none";
  int ends = 0;
};

FrameHeader AnswerOf(size_t bytes, bool is_refusal = false) {
  FrameHeader header = {};
  header.kind = FrameKind::kAnswer;
  header.length = bytes;
  header.detail = is_refusal;
  return header;
}

}  // namespace

TEST(QuestionsAreAnsweredByRanksThatHaveSaidGoodbye) {
  Job job(3, {0, 1, 2}, {}, 0);
  for (size_t bytes : {size_t{0}, size_t{5}, kInlineBytes, kInlineBytes + 1, size_t{3} << 20}) {
    std::string answer(bytes, 'x');
    int done = 0;
    job.protocol(0).Ask(2, "what?", answer.data(), bytes, [&](const std::string& error) {
      EXPECT_EQ(error, "", "a question");
      ++done;
    });
    std::vector<Question>& questions = job.rank(2).questions;
    job.Run([&] { return !questions.empty(); }, "the question");
    EXPECT(questions[0].peer == 0 && questions[0].text == "what?", "the question");
    job.protocol(2).SayGoodbye();
    job.protocol(2).Reply(0, questions[0].number, std::string(bytes, 'y'), /*is_refusal=*/false);
    questions.clear();
    job.Run([&] { return done == 1; }, "the answer");
    EXPECT(answer == std::string(bytes, 'y'), "the answer");
    EXPECT(!job.protocol(0).is_waiting(), "nothing is waited for");
  }
}

TEST(ARefusalEndsItsQuestionAlone) {
  Asking asking;
  asking.Take(AnswerOf(2, /*is_refusal=*/true), "no");
  EXPECT_EQ(asking.reason, "no", "why there is no answer");
  EXPECT_EQ(asking.rank->failure, "", "the job goes on");
}

TEST(WrongQuestionsAndAnswersEndTheJob) {
  FrameHeader question = {}, other = AnswerOf(3), detail = AnswerOf(3), large = AnswerOf(kInlineBytes + 1, true);
  question.kind = FrameKind::kQuestion;
  question.length = kInlineBytes + 1;
  other.step = 1;
  detail.detail = 2;
  struct Case {
    FrameHeader header;
    const char* says;
    int peer = 1;
  };
  for (const Case& each : std::vector<Case>{{other, "an answer to question 1, expected one that it was asked"},
                                            {AnswerOf(3), "an answer to question 0, expected one", 2},
                                            {AnswerOf(2), "an answer of 2 bytes to 'title', expected 3"},
                                            {detail, "an answer of 3 bytes with detail 2"},
                                            {large, "with detail 1, expected 0, or 1 for a reason of at most 32768"},
                                            {question, "a question of 32769 bytes, expected at most 32768"}}) {
    Asking asking;
    asking.Take(each.header, std::string(each.header.is_bulk() ? 0 : each.header.length, 'x'), each.peer);
    EXPECT_HOLDS(asking.rank->failure, each.says);
    EXPECT_EQ(asking.reason, asking.rank->failure, "why the question has ended");
    EXPECT(asking.transport->receives.empty(), "nothing is received");
  }
  Asking asking;
  asking.Take(AnswerOf(3), "abc");
  EXPECT(asking.reason.empty() && std::memcmp(asking.answer, "abc", 3) == 0, "answered");
  asking.Take(AnswerOf(3), "abc");
  EXPECT_HOLDS(asking.rank->failure, "an answer to question 0");
  EXPECT_EQ(asking.ends, 1, "a question ends once");
}

TEST(ARankThatDoesNotReplyIsNamed) {
  Options options;
  options.timeout_s = 0;
  Asking late(options);
  late.rank->protocol->CheckDeadlines();
  EXPECT_HOLDS(late.reason, "Rank 0 waited 0 s for rank 1 to answer 'title'. Look at the output of rank 1");
  late.rank->protocol->Ask(1, "", nullptr, 0, [&](const std::string& error) { EXPECT_EQ(error, late.reason, ""); });

  Asking left;
  FrameHeader goodbye = {};
  goodbye.kind = FrameKind::kGoodbye;
  left.Take(goodbye);
  EXPECT_EQ(left.reason, "none", "a rank at its end still answers");
}
