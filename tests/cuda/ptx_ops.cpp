/* See ptx.h. Compiled without contraction, run with denormals as they are: what .ftz flushes is
 * flushed here. */
#include "tests/cuda/ptx.h"

#include <math.h>
#include <string.h>
#include <xmmintrin.h>

#include "tests/cuda/emulate_device.h"

namespace
{

float f32(uint64_t bits)
{
    return emulate_bits<float>((uint32_t)bits);
}

double f64(uint64_t bits)
{
    return emulate_bits<double>(bits);
}

float flushed(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x;
}

/* What arithmetic leaves behind. */
uint64_t of_f32(float x)
{
    return isnan(x) ? 0x7fffffff : emulate_bits<uint32_t>(x);
}

uint64_t of_f64(double x)
{
    return emulate_bits<uint64_t>(x);
}

uint64_t shift_left(uint64_t x, uint64_t by)
{
    return by < 64 ? x << by : 0;
}

uint64_t shift_right(uint64_t x, uint64_t by)
{
    return by < 64 ? x >> by : 0;
}

/* Rounded toward minus infinity; the compiler must not know. */
__attribute__((noinline)) float fma_down(volatile float a, volatile float b, volatile float c)
{
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_ROUND_DOWN);
    volatile const float x = fmaf(a, b, c);
    _mm_setcsr(before);
    return x;
}

float saturated(float x)
{
    return !(x > 0) ? 0 : x > 1 ? 1 : x; /* NaN: 0 */
}

uint64_t insert(uint64_t from, uint64_t into, uint64_t at, uint64_t bits, unsigned width)
{
    at &= 0xff;
    bits &= 0xff;
    if (at >= width || bits == 0)
        return into;
    const uint64_t mask = (bits < width ? (UINT64_C(1) << bits) - 1 : ~UINT64_C(0)) << at;
    return (into & ~mask) | (from << at & mask);
}

/* Operand n, as a type. */
#define U64(n) r[o[n]]
#define U32(n) ((uint32_t)r[o[n]])
#define U16(n) ((uint16_t)r[o[n]])
#define S64(n) ((int64_t)r[o[n]])
#define S32(n) ((int32_t)r[o[n]])
#define S16(n) ((int16_t)r[o[n]])
#define F32(n) f32(r[o[n]])
#define F64(n) f64(r[o[n]])
#define FTZ(n) flushed(F32(n))

struct entry {
    const char *name;
    ptx_op op;
};

#define OP(name, value)                                                 \
    {                                                                   \
        name, [](uint64_t *r, const unsigned *o) { r[o[0]] = (value); } \
    }

/* One operation over widths. */
#define BITS(name, sign)                                                                  \
    OP(name ".b16", (uint16_t)(U16(1) sign U16(2))), OP(name ".b32", U32(1) sign U32(2)), \
        OP(name ".b64", U64(1) sign U64(2)), OP(name ".pred", U64(1) sign U64(2))
#define INTEGER(name, sign)                                                                   \
    OP(name ".u32", (uint32_t)(U32(1) sign U32(2))),                                          \
        OP(name ".s32", (uint32_t)(U32(1) sign U32(2))), OP(name ".u64", U64(1) sign U64(2)), \
        OP(name ".s64", U64(1) sign U64(2))
#define FLOATS(name, sign)                                           \
    OP(name ".rn.f32", of_f32(F32(1) sign F32(2))),                  \
        OP(name ".rn.ftz.f32", of_f32(flushed(FTZ(1) sign FTZ(2)))), \
        OP(name ".rn.f64", of_f64(F64(1) sign F64(2)))
#define MOVES(type) OP("mov." type, U64(1)), OP("selp." type, U64(3) != 0 ? U64(1) : U64(2))
#define COMPARE(name, sign)                                                                       \
    OP("setp." name ".u16", U16(1) sign U16(2)), OP("setp." name ".s16", S16(1) sign S16(2)),     \
        OP("setp." name ".u32", U32(1) sign U32(2)), OP("setp." name ".s32", S32(1) sign S32(2)), \
        OP("setp." name ".u64", U64(1) sign U64(2)), OP("setp." name ".s64", S64(1) sign S64(2)), \
        OP("setp." name ".f32", F32(1) sign F32(2)),                                              \
        OP("setp." name ".ftz.f32", FTZ(1) sign FTZ(2)),                                          \
        OP("setp." name ".f64", F64(1) sign F64(2))
#define COMPARE_BITS(name, sign)                                                              \
    OP("setp." name ".b16", U16(1) sign U16(2)), OP("setp." name ".b32", U32(1) sign U32(2)), \
        OP("setp." name ".b64", U64(1) sign U64(2))
/* "or unordered": the opposite does not hold */
#define COMPARE_UNORDERED(name, opposite)                \
    OP("setp." name "u.f32", !(F32(1) opposite F32(2))), \
        OP("setp." name "u.ftz.f32", !(FTZ(1) opposite FTZ(2)))

const struct entry entries[] = {
    MOVES("b16"),
    MOVES("u16"),
    MOVES("s16"),
    MOVES("b32"),
    MOVES("u32"),
    MOVES("s32"),
    MOVES("f32"),
    MOVES("b64"),
    MOVES("u64"),
    MOVES("s64"),
    MOVES("f64"),
    MOVES("pred"),

    BITS("and", &),
    BITS("or", |),
    BITS("xor", ^),
    OP("not.b16", (uint16_t)~U16(1)),
    OP("not.b32", ~U32(1)),
    OP("not.b64", ~U64(1)),
    OP("not.pred", U64(1) == 0),
    OP("shl.b32", (uint32_t)shift_left(U32(1), U32(2))),
    OP("shl.b64", shift_left(U64(1), U32(2))),
    OP("shr.u32", shift_right(U32(1), U32(2))),
    OP("shr.u64", shift_right(U64(1), U32(2))),
    OP("shr.u16", (uint16_t)shift_right(U16(1), U32(2))),
    OP("bfi.b32", insert(U32(1), U32(2), U32(3), U32(4), 32)),
    OP("bfi.b64", insert(U64(1), U64(2), U32(3), U32(4), 64)),

    INTEGER("add", +),
    INTEGER("sub", -),
    INTEGER("mul.lo", *),
    INTEGER("div", /),
    INTEGER("rem", %),
    OP("mad.lo.s32", (uint32_t)(U32(1) * U32(2) + U32(3))),
    OP("mul.wide.u16", (uint32_t)U16(1) * U16(2)),
    OP("neg.s64", 0 - U64(1)),
    OP("mul.wide.u32", (uint64_t)U32(1) * U32(2)),
    OP("mul.hi.u64", (uint64_t)((unsigned __int128)U64(1) * U64(2) >> 64)),
    OP("min.u32", U32(1) < U32(2) ? U32(1) : U32(2)),
    OP("max.u32", U32(1) > U32(2) ? U32(1) : U32(2)),
    OP("min.u64", U64(1) < U64(2) ? U64(1) : U64(2)),
    OP("max.u64", U64(1) > U64(2) ? U64(1) : U64(2)),

    COMPARE("eq", ==),
    COMPARE("ne", !=),
    COMPARE("lt", <),
    COMPARE("le", <=),
    COMPARE("gt", >),
    COMPARE("ge", >=),
    COMPARE_BITS("eq", ==),
    COMPARE_BITS("ne", !=),
    COMPARE_UNORDERED("ne", ==),
    COMPARE_UNORDERED("lt", >=),
    COMPARE_UNORDERED("le", >),
    COMPARE_UNORDERED("gt", <=),
    COMPARE_UNORDERED("ge", <),

    OP("setp.num.ftz.f32", !isnan(F32(1)) && !isnan(F32(2))),
    OP("setp.nan.ftz.f32", isnan(F32(1)) || isnan(F32(2))),

    FLOATS("add", +),
    FLOATS("sub", -),
    FLOATS("mul", *),
    FLOATS("div", /),
    OP("fma.rn.f32", of_f32(fmaf(F32(1), F32(2), F32(3)))),
    OP("fma.rn.ftz.f32", of_f32(flushed(fmaf(FTZ(1), FTZ(2), FTZ(3))))),
    OP("fma.rm.ftz.f32", of_f32(flushed(fma_down(FTZ(1), FTZ(2), FTZ(3))))),
    OP("fma.rn.f64", of_f64(fma(F64(1), F64(2), F64(3)))),
    OP("neg.ftz.f32", of_f32(-FTZ(1))),
    OP("neg.f32", of_f32(-F32(1))),
    OP("neg.f64", of_f64(-F64(1))),
    OP("sqrt.rn.ftz.f32", of_f32(flushed(sqrtf(FTZ(1))))),
    OP("sqrt.rn.f64", of_f64(sqrt(F64(1)))),
    OP("rcp.rn.ftz.f32", of_f32(flushed(1 / FTZ(1)))),
    OP("rcp.approx.ftz.f64", of_f64(1 / F64(1))),
    OP("ex2.approx.ftz.f32", of_f32(flushed(exp2f(FTZ(1))))),

    OP("cvt.u16.u32", U16(1)),
    OP("cvt.u16.u64", U16(1)),
    OP("cvt.u32.u16", U16(1)),
    OP("cvt.u64.u16", U16(1)),
    OP("cvt.u64.u32", U32(1)),
    OP("cvt.u32.u64", U32(1)),
    OP("cvt.s64.s32", (uint64_t)(int64_t)S32(1)),
    OP("cvt.rn.f32.u16", of_f32((float)U16(1))),
    OP("cvt.rn.f32.u32", of_f32((float)U32(1))),
    OP("cvt.rn.f64.u32", of_f64((double)U32(1))),
    OP("cvt.rn.f64.s32", of_f64((double)S32(1))),
    OP("cvt.ftz.f64.f32", of_f64((double)FTZ(1))),
    OP("cvt.rn.ftz.f32.f64", of_f32(flushed((float)F64(1)))),
    OP("cvt.ftz.sat.f32.f32", of_f32(saturated(FTZ(1)))),
    OP("cvta.to.global.u64", U64(1)),
    OP("cvta.shared.u64", reinterpret_cast<uint64_t>(ptx_shared) + U64(1)),
};

} /* namespace */

ptx_op ptx_op_find(const char *name)
{
    for (const struct entry &e : entries)
        if (strcmp(e.name, name) == 0)
            return e.op;
    return nullptr;
}
