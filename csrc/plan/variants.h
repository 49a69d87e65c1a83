// The list of variants, which dispatch in csrc follows, and (through tests/native) the tests.
#pragma once

namespace flash_ext {

// Algorithms, in the order of flash_ext.VARIANTS.
enum class Variant { kFa1, kFa2, kFa3 };
inline constexpr const char* kVariantNames[] = {"fa1", "fa2", "fa3"};
inline constexpr int kVariants = 3;
inline constexpr Variant kFastestVariant = Variant::kFa3;

constexpr const char* name_of(Variant variant) { return kVariantNames[static_cast<int>(variant)]; }

}  // namespace flash_ext
