// Runs the tests whose names contain one of the arguments; without arguments, all tests.

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"

int main(int count, char** arguments) {
  const std::vector<std::string> wanted(arguments + 1, arguments + count);
  const auto begin = std::chrono::steady_clock::now();
  int passed = 0, failed = 0;
  for (const check::Test& test : check::Tests()) {
    const auto is_part = [&](const std::string& name) {
      return std::string(test.name).find(name) != std::string::npos;
    };
    if (!wanted.empty() && std::none_of(wanted.begin(), wanted.end(), is_part)) continue;
    try {
      test.run();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::cerr << "FAILED " << test.name << ": " << error.what() << std::endl;
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::ostringstream summary;  // written at once, since several ranks write
  summary << arguments[0] << ": " << passed << " passed, " << failed << " failed in " << seconds.count() << " s\n";
  std::cout << summary.str() << std::flush;
  if (passed + failed == 0) std::cerr << "No test has such a name." << std::endl;
  return failed > 0 || passed == 0;
}
