/* What a tensor comes to, as text and as JSON. */
#ifndef SHD_CTL_SHOW_DRAW_H
#define SHD_CTL_SHOW_DRAW_H

#include <stdio.h>

#include <jansson.h>

#include "client/shd.h"

/* Numbers in lines of "name value", two blanks before each line. */
void draw_stats(const struct shd_tensor_stats *s, FILE *out);

/* A line for each power of two that magnitudes are in, those below zero to the left. Beyond
 * DRAW_ROWS_MAX lines the smallest share the last one. */
#define DRAW_ROWS_MAX 24u
void draw_histogram(const struct shd_tensor_stats *s, FILE *out);

/* "12", "1.5e-07", "nan"; as JSON a number, or one of the strings "nan", "inf", "-inf". */
#define DRAW_NUMBER_BYTES 32u
const char *draw_number(double x, char buf[DRAW_NUMBER_BYTES]);
json_t *draw_json_number(double x);

/* Into o: what is counted, and the histogram's rows {from, to, below, above} that are not empty. */
void draw_json(const struct shd_tensor_stats *s, json_t *o);

#endif
