#include "scale.h"
#include <stdio.h>

int main(void) {
  float in[4] = {1, -2, 3, 0}, out[4] = {9, 9, 9, 9};
  corey_float_2d x = {in, in, 0, {2, 2}, {2, 1}},
                 y = {out, out, 0, {2, 2}, {2, 1}};
  corey_scale(&x, &y);
  printf("%g %g %g %g\n", out[0], out[1], out[2], out[3]);
  return 0;
}
