/* See spec_segment.h. */
#include "proto/share/spec_segment.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

static int check_bytes(uint64_t bytes, struct shd_err *e)
{
    if (bytes >= SPEC_SEGMENT_BYTES_MIN && bytes <= SPEC_JSON_BYTES_MAX)
        return SHD_OK;
    return err_set(e, SHD_ERANGE,
                   "a spec of %" PRIu64 " bytes in a segment, must be %u to %zu: a smaller one is "
                   "in its message",
                   bytes, SPEC_SEGMENT_BYTES_MIN, SPEC_JSON_BYTES_MAX);
}

int spec_stub_of(const char *json, uint64_t bytes, struct spec_stub *ret_stub, struct shd_err *e)
{
    ret_stub->bytes = bytes;
    if (EVP_Digest(json, bytes, ret_stub->sum, NULL, EVP_sha256(), NULL) != 1)
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    return SHD_OK;
}

int spec_segment_new(const char *json, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e)
{
    int r = check_bytes(bytes, e);
    if (r == SHD_OK)
        r = segment_new("shardd-spec", SEGMENT_SPEC, bytes, ret_segment, e);
    if (r == SHD_OK)
        memcpy(ret_segment->base, json, bytes);
    return r;
}

int spec_segment_check(int fd, uint64_t bytes, struct shd_err *e)
{
    const int r = check_bytes(bytes, e);
    return r == SHD_OK ? segment_check(fd, SEGMENT_SPEC, layout_align(bytes, SHD_PAGE_BYTES), e)
                       : r;
}

/* Reading, unlike a mapping, says by an error what the host has no memory for. */
int spec_segment_read(int fd, uint64_t bytes, char *ret_json, struct shd_err *e)
{
    for (uint64_t done = 0; done < bytes;) {
        const ssize_t n = pread(fd, ret_json + done, bytes - done, (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, SHD_EIO, "read spec segment at byte %" PRIu64, done);
        if (n == 0)
            return err_set(e, SHD_ESEGMENT, "spec segment ends at byte %" PRIu64 " of %" PRIu64,
                           done, bytes);
        done += (uint64_t)n;
    }
    return SHD_OK;
}

int spec_stub_check(const struct spec_stub *stub, const char *json, struct shd_err *e)
{
    struct spec_stub found;
    const int r = spec_stub_of(json, stub->bytes, &found, e);
    if (r != SHD_OK || memcmp(found.sum, stub->sum, sizeof found.sum) == 0)
        return r;
    return err_set(e, SHD_ESEGMENT,
                   "spec of %" PRIu64 " bytes has SHA-256 %02x%02x%02x%02x..., said was "
                   "%02x%02x%02x%02x...",
                   stub->bytes, found.sum[0], found.sum[1], found.sum[2], found.sum[3],
                   stub->sum[0], stub->sum[1], stub->sum[2], stub->sum[3]);
}
