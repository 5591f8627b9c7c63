// A minimal test framework: no package registry that CI can reach has one for C++.

#ifndef POSEIDON_TESTS_NATIVE_CHECK_H_
#define POSEIDON_TESTS_NATIVE_CHECK_H_

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

// Throws the failure of a check; `where` describes the case.
[[noreturn]] inline void Fail(const char* file, int line, const std::string& text, const std::string& where) {
  std::ostringstream out;
  out << file << ':' << line << ": " << text << (where.empty() ? "" : " (" + where + ")");
  throw std::logic_error(out.str());
}

template <typename A, typename B, typename Where>
void Equal(const char* file, int line, const char* text, const A& a, const B& b, const Where& where) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " and " << b;
  Fail(file, line, out.str(), where());
}

inline void Contains(const char* file, int line, const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) Fail(file, line, "'" + text + "' does not hold '" + part + "'", "");
}

}  // namespace check

#define TEST(name)                                                 \
  static void name();                                              \
  static const check::Registration name##_registered(#name, name); \
  static void name()
// A test ends at its first failed check; `where`, a text, names the case of a table.
#define EXPECT(condition, where) ((condition) ? void() : check::Fail(__FILE__, __LINE__, #condition, where))
#define EXPECT_EQ(a, b, where) check::Equal(__FILE__, __LINE__, #a " == " #b, a, b, [&] { return std::string(where); })
#define EXPECT_HOLDS(text, part) check::Contains(__FILE__, __LINE__, text, part)

#endif  // POSEIDON_TESTS_NATIVE_CHECK_H_
