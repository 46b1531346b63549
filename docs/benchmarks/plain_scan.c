/*===- plain_scan.c - The plain loop that scans are compared with --*- C
-*-===*\
|*
|* SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
|*
\*===----------------------------------------------------------------------===*/

/* Mamba-1 scan, B1 L512 D2048 N16, f32, one thread, as one would write it:
 *
 *   gcc -O3 -march=native plain_scan.c -o plain_scan -lm && ./plain_scan
 *
 * Prints the milliseconds of nine runs. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { L = 512, D = 2048, N = 16 };

static float u[L * D], dt[L * D], z[L * D], y[L * D];
static float A[D * N], B[L * N], C[L * N], h[D * N];

static void scan(void) {
  for (int i = 0; i < D * N; i++)
    h[i] = 0;
  for (int t = 0; t < L; t++)
    for (int d = 0; d < D; d++) {
      float step = dt[t * D + d] - 2;
      step = step > 20 ? step : log1pf(expf(step));
      float input = step * u[t * D + d], sum = 0;
      for (int n = 0; n < N; n++) {
        float v =
            expf(step * A[d * N + n]) * h[d * N + n] + input * B[t * N + n];
        h[d * N + n] = v;
        sum += v * C[t * N + n];
      }
      y[t * D + d] = sum * z[t * D + d] / (1 + expf(-z[t * D + d]));
    }
}

int main(void) {
  for (int i = 0; i < L * D; i++) {
    u[i] = z[i] = rand() / (float)RAND_MAX - 0.5f;
    dt[i] = rand() / (float)RAND_MAX;
  }
  for (int i = 0; i < D * N; i++)
    A[i] = -(float)(i % N + 1);
  for (int i = 0; i < L * N; i++) {
    B[i] = rand() / (float)RAND_MAX - 0.5f;
    C[i] = rand() / (float)RAND_MAX - 0.5f;
  }
  double check = 0;
  for (int run = 0; run < 9; run++) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    scan();
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.1f ms\n", (end.tv_sec - begin.tv_sec) * 1e3 +
                            (end.tv_nsec - begin.tv_nsec) * 1e-6);
    check += y[run * 1000 + 123];
  }
  return check != check;
}
