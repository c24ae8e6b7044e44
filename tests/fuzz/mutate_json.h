/* Mutations of JSON text that keep it JSON, most of the time. */
#ifndef SHD_FUZZ_MUTATE_JSON_H
#define SHD_FUZZ_MUTATE_JSON_H

#include <stddef.h>
#include <stdint.h>

/* Change data[size], at most max bytes afterwards; returns the new size. Text that does not parse
 * is left to libFuzzer. */
size_t mutate_json(uint8_t *data, size_t size, size_t max, unsigned seed);

#endif
