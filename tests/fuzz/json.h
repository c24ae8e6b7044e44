/* Mutations of inputs that are JSON. */
#ifndef SHD_TESTS_FUZZ_JSON_H
#define SHD_TESTS_FUZZ_JSON_H

#include <stddef.h>
#include <stdint.h>

/* Mutations that keep JSON text JSON, most of the time: one value of the document is replaced,
 * doubled, dropped or renamed. data[size] has at most max bytes afterwards; returns the new size.
 * Text that does not parse is left to libFuzzer. */
size_t mutate_json(uint8_t *data, size_t size, size_t max, unsigned seed);

#endif
