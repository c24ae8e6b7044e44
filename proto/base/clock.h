/* Time: nanoseconds of CLOCK_MONOTONIC, which all processes of a host share and which libuv's
 * uv_hrtime() reads too, and what they are counted in. */
#ifndef SHD_CLOCK_H
#define SHD_CLOCK_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

#define NS_PER_US UINT64_C(1000)
#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S  UINT64_C(1000000000)
#define US_PER_MS UINT64_C(1000)
#define US_PER_S  UINT64_C(1000000)
#define US_PER_NS 1e-3
#define MS_PER_NS 1e-6
#define S_PER_NS  1e-9

static inline uint64_t clock_read_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static inline uint64_t clock_now_ns(void)
{
    return clock_read_ns(CLOCK_MONOTONIC);
}

/* Now, as logs have it: "2026-11-22T08:00:00.123Z". Returns buf. */
#define CLOCK_TEXT_BYTES 40u
static inline const char *clock_text(char buf[CLOCK_TEXT_BYTES])
{
    struct timespec t;
    struct tm tm;
    char seconds[24] = "";
    clock_gettime(CLOCK_REALTIME, &t);
    if (gmtime_r(&t.tv_sec, &tm) != NULL)
        strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(buf, CLOCK_TEXT_BYTES, "%s.%03ldZ", seconds, t.tv_nsec / (long)NS_PER_MS);
    return buf;
}

static inline struct timespec clock_timespec(uint64_t ns)
{
    return (struct timespec){ .tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S) };
}

#endif
