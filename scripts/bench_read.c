/* How fast this memory can be read at all: a sum over it, with nothing else to do. */
#include <stdint.h>

uint64_t read_all(const uint64_t *from, int64_t nbytes, int threads) {
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (int64_t part = 0; part < nbytes / 65536; part++) {
    const uint64_t *x = from + part * 8192;
    uint64_t s = 0;
    for (int i = 0; i < 8192; i++) s += x[i];
    sum += s;
  }
  return sum;
}
