// Runs cases (see cases.h) with host threads.

#include "host_ranks.h"

int main() {
  jdp::Case one;
  while (jdp::read_case(&one)) jdp::write_result(one, jdp::run(one));
}
