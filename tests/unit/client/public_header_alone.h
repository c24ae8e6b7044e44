/* What a user of client/shd.h sees, as data: see test_public_header.c. */
#ifndef SHD_PUBLIC_HEADER_ALONE_H
#define SHD_PUBLIC_HEADER_ALONE_H

#include <stddef.h>

struct public_constant {
    const char *name;
    long long value;
};

extern const struct public_constant public_codes[];
extern const size_t public_code_count;
extern const struct public_constant public_dtypes[];
extern const size_t public_dtype_count;
extern const struct public_constant public_numbers[];
extern const size_t public_number_count;

#endif
