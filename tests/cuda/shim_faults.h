/* Failures on request, for the shims: "cuMemCreate@3:2,copy@1+,work@2:kill" says that the third
 * cuMemCreate returns 2, every copy fails as the shim's calls usually do, and the second work does
 * what the shim's word stands for. Counts of calls begin again with each such text. Whoever calls
 * these holds the shim's lock. */
#ifndef SHD_TESTS_CUDA_SHIM_FAULTS_H
#define SHD_TESTS_CUDA_SHIM_FAULTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"

struct shim_function { /* or work */
    const char *name;
    uint64_t calls;
};

struct shim_faults {
    struct shim_function *functions;
    size_t function_count;
    const char *word; /* ":kill" */
    int word_result;
    int usual_result; /* without a number */
    struct {
        char name[64];
        uint64_t nth;
        bool later; /* and those after it */
        int result;
    } at[16];
    size_t count;
};

static void shim_faults_set(struct shim_faults *f, const char *spec)
{
    f->count = 0;
    for (size_t i = 0; i < f->function_count; i++)
        f->functions[i].calls = 0;
    while (spec != NULL && *spec != '\0') {
        const size_t name = strcspn(spec, "@:,"), word = strlen(f->word);
        CHECK(name > 0 && name < sizeof f->at[0].name && f->count < ARRAY_SIZE(f->at));
        memset(&f->at[f->count], 0, sizeof f->at[0]);
        memcpy(f->at[f->count].name, spec, name);
        f->at[f->count].nth = 1;
        f->at[f->count].result = f->usual_result;
        spec += name;
        if (*spec == '@')
            f->at[f->count].nth = strtoull(spec + 1, (char **)&spec, 10);
        f->at[f->count].later = *spec == '+';
        spec += *spec == '+';
        if (strncmp(spec, f->word, word) == 0) {
            f->at[f->count].result = f->word_result;
            spec += word;
        } else if (*spec == ':') {
            f->at[f->count].result = (int)strtol(spec + 1, (char **)&spec, 10);
        }
        CHECK(*spec == ',' || *spec == '\0');
        spec += *spec == ',';
        f->count++;
    }
}

static struct shim_function *shim_faults_find(struct shim_faults *f, const char *name)
{
    for (size_t i = 0; i < f->function_count; i++)
        if (strcmp(f->functions[i].name, name) == 0)
            return &f->functions[i];
    return NULL;
}

/* Count a call; the result it is to have, 0: its own. */
static int shim_faults_count(struct shim_faults *f, const char *name)
{
    struct shim_function *function = shim_faults_find(f, name);
    CHECK(function != NULL);
    const uint64_t calls = ++function->calls;
    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->at[i].name, name) == 0 &&
            (f->at[i].nth == calls || (f->at[i].later && f->at[i].nth < calls)))
            return f->at[i].result;
    return 0;
}

#endif
